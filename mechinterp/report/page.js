"use strict";
// Draws the figures in the page's colours, moves their frames with a slider, and sorts tables.
const looks = JSON.parse(document.getElementById("looks").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const divs = [...document.querySelectorAll(".figure")];
const look = () => looks[dark.matches ? "dark" : "light"];

async function draw(div) {
  const { data, layout, frames, titles } = JSON.parse(div.nextElementSibling.textContent);
  layout.template = look();
  // A finger that scrolls the page must not zoom.
  if (matchMedia("(pointer: coarse)").matches) layout.dragmode = false;
  await Plotly.newPlot(div, { data, layout, frames, config: { responsive: true, displaylogo: false } });
  div.titles = titles;
  div.dataset.drawn = "yes";
}

async function drawAll() {
  for (const div of divs) {
    await draw(div);
    await new Promise((resolve) => setTimeout(resolve));
  }
  document.body.dataset.drawn = "yes";
}

for (const input of document.querySelectorAll(".slider input")) {
  const names = JSON.parse(input.dataset.frames);
  const label = input.parentElement.querySelector("output");
  const moving = [...input.closest("section").querySelectorAll(".figure")];
  input.setAttribute("aria-valuetext", names.at(-1));
  input.addEventListener("input", () => {
    const name = names[input.value];
    label.textContent = name;
    input.setAttribute("aria-valuetext", name);
    for (const div of moving) {
      if (!(div.titles && name in div.titles)) continue;
      div.previousElementSibling.textContent = div.titles[name];
      Plotly.animate(div, [name], {
        mode: "immediate", frame: { duration: 0, redraw: true }, transition: { duration: 0 },
      }).catch(() => {}); // a later move has taken the place of this one
    }
  });
}

function sort(header) {
  const body = header.closest("table").tBodies[0];
  const up = header.getAttribute("aria-sort") !== "ascending";
  const text = (row) => row.cells[header.cellIndex].textContent;
  const compare = (a, b) => {
    const [x, y] = [parseFloat(text(a)), parseFloat(text(b))];
    if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y) || text(a).localeCompare(text(b));
    return x - y;
  };
  for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", up ? "ascending" : "descending");
  body.append(...[...body.rows].sort((a, b) => (up ? compare(a, b) : compare(b, a))));
}

for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => sort(button.parentElement));
}
dark.addEventListener("change", () => {
  for (const div of divs) if (div.dataset.drawn) Plotly.relayout(div, { template: look() });
});
// After the text is on the screen.
requestAnimationFrame(() => setTimeout(drawAll));
