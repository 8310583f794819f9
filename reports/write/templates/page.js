"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const figures = read("figures");
  const themes = read("themes");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const hidden = new Set();
  const views = new Map();
  let metric = document.querySelector("input[name=metric]:checked")?.value ?? "nll";
  document.documentElement.classList.add("js");

  const recoloured = (value) => {
    if (Array.isArray(value)) return value.map(recoloured);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [
      key,
      key === "range" && Array.isArray(item) ? item.map((colour) => themes.darkOf[colour] ?? colour) : recoloured(item),
    ]));
  };

  const tooltip = () => ({ id: "vg-tooltip-element", disableDefaultStyle: true, theme: "sbeval", offsetX: 14, offsetY: 14 });

  const unlegend = (value) => {
    if (value === null || typeof value !== "object") return;
    for (const [key, item] of Object.entries(value)) {
      if (key === "color" && item?.scale) item.legend = null;
      else unlegend(item);
    }
  };

  const fit = (spec, width, narrow) => {
    if (spec.usermeta?.partPixels) {
      const columns = Math.floor(width / spec.usermeta.partPixels);
      if (columns < spec.columns) spec.columns = columns >= 2 ? 2 : 1;
    } else if (spec.concat) {
      const stacked = Boolean(spec.concat[0].vconcat);
      const smallest = stacked ? 330 : 255;
      spec.columns = Math.max(1, Math.min(spec.concat.length, Math.floor(width / smallest)));
      const room = Math.floor(width / Math.max(spec.columns, stacked ? 2 * (width > 660) : 1));
      for (const part of spec.concat) {
        for (const piece of part.vconcat ?? [part]) piece.width = Math.min(430, room - (stacked ? 96 : 66));
      }
    } else {
      spec.width = "container";
      spec.autosize = { type: "fit-x", contains: "padding" };
      const { labelRoomPixels: needed = 0, labelLeaning: leaning = 0, widthPixels: planned = width } = spec.usermeta ?? {};
      const beyond = Math.max(12, needed + leaning * (planned - (width - 60)));  // a narrower plot leaves less free
      spec.padding = { ...spec.padding, right: 12 + Math.round((leaning / (1 - leaning)) * beyond) };  // as does this
      if (narrow || needed > 0.34 * width) {  // the buttons name the lines where no room is left
        spec.padding = { left: 2, top: 6, bottom: 6, right: 16 };
        spec.layer = spec.layer.filter((layer) => !["series-text", "leader"].includes(layer.mark.style));
      }
    }
  };

  async function draw(holder) {
    const figure = figures[holder.dataset.figure];
    const variant = figure.variants[metric] ?? Object.values(figure.variants)[0];
    const narrow = holder.clientWidth < 460;
    let spec = structuredClone(variant);
    delete spec.title;
    fit(spec, holder.clientWidth, narrow);
    for (const param of spec.params ?? []) {
      if (param.name === "hidden") param.value = [...hidden];
    }
    if (dark.matches) spec = recoloured(spec);
    const lines = Boolean(spec.params);
    const config = structuredClone(dark.matches ? themes.dark : themes.light);
    if (lines) unlegend(spec);
    views.get(holder)?.finalize();
    const result = await vegaEmbed(holder, spec, {
      actions: false, renderer: "svg", ast: true, mode: "vega-lite", tooltip: tooltip(),
      config,
    });
    views.set(holder, result);
    holder.dataset.drawn = metric;
  }

  const holders = [...document.querySelectorAll(".chart")];
  const drawAll = () => Promise.all(holders.filter((holder) => holder.dataset.near).map(draw));

  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      entry.target.dataset.near = "yes";
      draw(entry.target);
    }
  }, { rootMargin: "900px" });
  holders.forEach((holder) => watcher.observe(holder));

  dark.addEventListener("change", drawAll);
  let width = window.innerWidth;
  let waiting;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 150);
  });

  for (const input of document.querySelectorAll("input[name=metric]")) {
    input.addEventListener("change", () => { metric = input.value; drawAll(); });
  }

  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const label = button.dataset.series;
      if (!hidden.delete(label)) hidden.add(label);
      for (const other of document.querySelectorAll(".legend button")) {
        if (other.dataset.series === label) other.setAttribute("aria-pressed", String(!hidden.has(label)));
      }
      for (const { view } of views.values()) {
        try { view.signal("hidden", [...hidden]).runAsync(); } catch { /* a figure without lines has nothing to hide */ }
      }
    });
  }
})();
