"use strict";
// Draws the figures in the page's colours, moves their frames with a slider, and sorts tables.
const looks = JSON.parse(document.getElementById("looks").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const divs = [...document.querySelectorAll(".figure")];
const tables = [...document.querySelectorAll(".table table")];
const scheme = () => (dark.matches ? "dark" : "light");
const look = () => looks.templates[scheme()];

// Colours that a template cannot give: heatmaps on the page's ground, and the curve of the model.
function scaled(trace) {
  const scales = looks.scales[scheme()];
  return trace.zmin < 0 ? scales.signed : scales.unsigned;
}

function repaint(div) {
  div.data.forEach((trace, index) => {
    if (trace.zmin !== undefined) Plotly.restyle(div, { colorscale: [scaled(trace)] }, [index]);
    if (trace.meta === "model") Plotly.restyle(div, { "line.color": looks.scales[scheme()].model }, [index]);
  });
  return Plotly.relayout(div, { template: look() });
}

async function draw(div) {
  const { data, layout, frames, titles } = JSON.parse(div.nextElementSibling.textContent);
  layout.template = look();
  for (const trace of data) {
    if (trace.zmin !== undefined) trace.colorscale = scaled(trace);
    if (trace.meta === "model") trace.line.color = looks.scales[scheme()].model;
  }
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

// In one layer heads add up: a subset's prediction is the sum of what its heads add.
for (const box of document.querySelectorAll(".toggles")) {
  const { said, outputs, rest, target } = JSON.parse(box.dataset.found);
  const switches = [...box.querySelectorAll("input")];
  const sum = (prompt, on) => rest.map((start, n) =>
    outputs[prompt].reduce((total, head, h) => total + (on[h] ? head[n] : 0), start));
  const told = (values) => values.map((value) => value.toFixed(3)).join(", ");
  const show = () => {
    const on = switches.map((each) => each.checked);
    const risk = said[on.map(Number).join("")];
    box.querySelector("output").textContent = `Excess risk with these heads: ${risk} y²`;
    [...box.querySelector("tbody").rows].forEach((row, prompt) => {
      row.cells[1].textContent = told(sum(prompt, on));
      row.cells[2].textContent = told(sum(prompt, on.map(() => true)));
      row.cells[3].textContent = told(target[prompt]);
    });
  };
  switches.forEach((each) => each.addEventListener("change", show));
  show();
}

function sort(header) {
  const body = header.closest("table").tBodies[0];
  const up = header.getAttribute("aria-sort") !== "ascending";
  const text = (row) => row.cells[header.cellIndex].textContent;
  const compare = (a, b) => {
    const [x, y] = [parseFloat(text(a)), parseFloat(text(b))];
    if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y) || text(a).localeCompare(text(b), "en", { numeric: true });
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
  for (const div of divs) if (div.dataset.drawn) repaint(div);
});

// Columns that do not fit on paper stand below, the first one repeated.
const PAPER = 680;
function split(table) {
  const widths = [...table.rows[0].cells].map((cell) => cell.offsetWidth);
  const blocks = [[0]];
  let room = PAPER - widths[0];
  widths.slice(1).forEach((width, index) => {
    if (width > room && blocks.at(-1).length > 1) {
      blocks.push([0]);
      room = PAPER - widths[0];
    }
    blocks.at(-1).push(index + 1);
    room -= width;
  });
  const only = (part, block) => {
    for (const row of part.rows) [...row.cells].forEach((cell, column) => { cell.hidden = !block.includes(column); });
  };
  for (const block of blocks.slice(1).reverse()) {
    const part = table.cloneNode(true);
    part.deleteCaption();
    only(part, block);
    table.after(part);
  }
  only(table, blocks[0]);
}

// On paper there is nothing to scroll or to open: figures and tables as wide as the sheet, every text unfolded.
const folded = [];
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details:not([open])")) {
    details.open = true;
    folded.push(details);
  }
  for (const div of divs) if (div.dataset.drawn) Plotly.relayout(div, { width: PAPER });
  document.body.classList.add("paper");
  tables.forEach(split);
});
addEventListener("afterprint", () => {
  for (const details of folded.splice(0)) details.open = false;
  for (const div of divs) if (div.dataset.drawn) Plotly.relayout(div, { autosize: true, width: null });
  document.body.classList.remove("paper");
  for (const table of tables) {
    for (const cell of table.querySelectorAll("[hidden]")) cell.hidden = false;
    while (table.nextElementSibling) table.nextElementSibling.remove();
  }
});

// A figure that was drawn while it was folded away takes its width when it is unfolded.
for (const details of document.querySelectorAll("details.more")) {
  details.addEventListener("toggle", () => {
    for (const div of details.querySelectorAll(".figure")) if (div.dataset.drawn) Plotly.Plots.resize(div);
    tell();
  });
}

// A term unfolds the list of words that it leads to.
for (const term of document.querySelectorAll(".term")) {
  term.addEventListener("click", () => { document.querySelector(term.hash).closest("details").open = true; });
}

// A table that is wider than the page says so.
function tell() {
  for (const box of document.querySelectorAll(".table")) {
    box.classList.toggle("wide", box.scrollWidth > box.clientWidth + 1);
  }
}
addEventListener("resize", tell);
tell();
// After the text is on the screen.
requestAnimationFrame(() => setTimeout(drawAll));
