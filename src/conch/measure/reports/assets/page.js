// Draws charts when they come into view, in the colours of the reader, and sorts tables by the heading that is pressed.
"use strict";
(() => {
  const configs = JSON.parse(document.getElementById("chart-configs").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Map();

  function draw(figure) {
    const place = figure.querySelector(".drawn");
    const spec = JSON.parse(figure.querySelector("script").textContent);
    const config = structuredClone(dark.matches ? configs.dark : configs.light);
    const width = figure.clientWidth;
    config.legend.columns = Math.max(1, Math.floor(width / 190));
    config.legend.labelLimit = Math.min(config.legend.labelLimit, width - 60);
    spec.width = "container";
    spec.autosize = { type: "fit-x", contains: "padding" };
    const options = {
      config, mode: "vega-lite", renderer: "svg", tooltip: { theme: dark.matches ? "dark" : "light" },
      actions: { export: true, source: false, compiled: false, editor: false },
    };
    figure.classList.add("live");
    vegaEmbed(place, spec, options).then(
      (result) => drawn.set(figure, result),
      () => figure.classList.remove("live"),
    );
  }

  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) {
        watcher.unobserve(entry.target);
        draw(entry.target);
      }
    }
  }, { rootMargin: "300px" });
  for (const figure of document.querySelectorAll("figure")) watcher.observe(figure);

  dark.addEventListener("change", () => {
    for (const [figure, result] of drawn) {
      result.finalize();
      draw(figure);
    }
  });

  function key(row, column) {
    const text = row.cells[column].textContent.trim();
    const number = parseFloat(text.replaceAll(",", ""));
    return Number.isNaN(number) ? text : number;
  }

  function compare(one, other) {
    if (typeof one === typeof other) return typeof one === "number" ? one - other : one.localeCompare(other);
    return typeof one === "number" ? -1 : 1;
  }

  for (const heading of document.querySelectorAll("th")) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const down = heading.ariaSort === "ascending";
      for (const other of heading.parentNode.cells) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const body = heading.closest("table").tBodies[0];
      const rows = [...body.rows].sort((one, other) => compare(key(one, heading.cellIndex), key(other, heading.cellIndex)));
      body.append(...(down ? rows.reverse() : rows));
    });
  }
})();
