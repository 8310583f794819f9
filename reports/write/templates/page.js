"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const figures = read("figures");
  const themes = read("themes");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const hidden = new Set();
  const views = new Map();
  const metrics = () => [...document.querySelectorAll(".metrics input:checked")].map((input) => input.value);
  let axis = document.querySelector(".axes input:checked")?.value ?? "tokens";
  document.documentElement.classList.add("js");

  const recoloured = (value) => {
    if (Array.isArray(value)) return value.map(recoloured);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [
      key,
      key === "range" && Array.isArray(item) ? item.map((colour) => themes.darkOf[colour] ?? colour) : recoloured(item),
    ]));
  };

  // like on_axis in figures/lengths.py for image files: each row holds its place on every axis
  const onAxis = (value, channel) => {
    if (Array.isArray(value)) return value.map((item) => onAxis(item, channel));
    if (value === null || typeof value !== "object") return value;
    if (value.scale && ["x", "label_x"].includes(value.field)) return { ...value, ...channel };
    const changed = Object.fromEntries(Object.entries(value).map(([key, item]) => [key, onAxis(item, channel)]));
    for (const name of ["x", "label_x", "text"]) {
      if (`${name}_${axis}` in changed) changed[name] = changed[`${name}_${axis}`];
    }
    return changed;
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
      const names = namesBeside(spec, width);
      spec.padding = { ...spec.padding, right: 12 + Math.ceil(Math.max(0, ...names.map((name) => name.padding))) };
      if (narrow || names.some((name) => name.beyond > 0.42 * width)) {  // the buttons name the lines where no room is left
        spec.padding = { left: 2, top: 6, bottom: 6, right: 16 };
        spec.layer = spec.layer.filter((layer) => layer.data?.name !== "ends");
      }
    }
  };

  const pen = document.createElement("canvas").getContext("2d");
  const namesBeside = (spec, width) => {
    const [low, high] = spec.layer.at(-1).encoding.x.scale.domain;
    pen.font = `500 13px ${themes.light.font}`;
    return (spec.datasets?.ends ?? []).map((end) => {
      const free = Math.min(0.95, Math.log(high / end.label_x) / Math.log(high / low));
      const beyond = Math.min(260, pen.measureText(end.setting).width) + 22 - free * width;
      // Vega adds padding for names beyond the plot, and the plot becomes narrower, so that more of each name is beyond it
      return { beyond, padding: (free * (beyond + 64)) / (1 - free * free) };
    });
  };

  // like spread in figures/labels.py for image files: names at least a label apart, colliding ones around their mean
  const apart = (ends, scale, height) => {
    const groups = [];
    for (const end of ends.filter((one) => !hidden.has(one.setting)).sort((a, b) => scale(a.y) - scale(b.y))) {
      let last = { ends: [end], middle: scale(end.y) };
      for (let above = groups.at(-1); above; above = groups.at(-1)) {
        const [count, own] = [above.ends.length, last.ends.length];
        if (last.middle - above.middle >= (count + own) * 7.5) break;
        groups.pop();
        last = { ends: [...above.ends, ...last.ends], middle: (above.middle * count + last.middle * own) / (count + own) };
      }
      groups.push(last);
    }
    let lowest = height - 5;
    const placed = groups.flatMap(({ ends: own, middle }) => own.map((end, index) => [end, middle + (index - (own.length - 1) / 2) * 15]));
    return placed.reverse().map(([end, middle]) => {
      const at = Math.min(middle, lowest);
      lowest = at - 15;
      return { ...end, shift: at - scale(end.y) };
    });
  };

  const placeNames = async (view, spec) => {
    const ends = spec.datasets?.ends;
    if (ends && spec.layer.some((layer) => layer.data?.name === "ends")) {
      // Vega tags the rows that it has read and would ignore them: pass copies without its tags
      await view.data("ends", apart(structuredClone(ends), view.scale("y"), view.height())).runAsync();
    }
  };

  async function draw(holder) {
    const figure = figures[holder.dataset.figure];
    const shown = metrics();
    const metric = Object.keys(figure.variants).find((name) => shown.includes(name)) ?? Object.keys(figure.variants)[0];
    const variant = figure.variants[metric];
    const narrow = holder.clientWidth < 460;
    let spec = structuredClone(variant);
    delete spec.title;
    const channel = spec.usermeta?.axes?.[axis];
    if (channel) spec = onAxis({ ...spec, usermeta: {} }, channel);
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
    await placeNames(result.view, spec);
    const finding = holder.parentElement.querySelector(".finding");
    finding.textContent = figure.findings[metric] ?? figure.finding;
    holder.dataset.drawn = metric;
    holder.dataset.axis = channel ? axis : "tokens";
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

  const follow = (kind, choose) => {
    const switches = [...document.querySelectorAll(`.${kind} input`)];
    for (const input of switches) {
      input.addEventListener("change", () => {
        choose(input.value);
        // a section without this choice keeps its current one
        for (const other of switches) if (other.value === input.value) other.checked = true;
        drawAll();
      });
    }
  };
  follow("metrics", () => {});
  follow("axes", (value) => { axis = value; });

  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const label = button.dataset.series;
      if (!hidden.delete(label)) hidden.add(label);
      for (const other of document.querySelectorAll(".legend button")) {
        if (other.dataset.series === label) other.setAttribute("aria-pressed", String(!hidden.has(label)));
      }
      for (const { view, spec } of views.values()) {
        if (spec.params) view.signal("hidden", [...hidden]).runAsync().then(() => placeNames(view, spec));
      }
    });
  }
})();
