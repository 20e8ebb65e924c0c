// Formulas in \( \) and \[ \], as the Markdown extension leaves them, drawn by KaTeX.
for (const place of document.querySelectorAll(".arithmatex")) {
  const text = place.textContent.trim();
  katex.render(text.slice(2, -2), place, { displayMode: text.startsWith("\\["), throwOnError: false });
}
