// All but the charts works without this. It draws them with uPlot, smooths them, asks for news, and moves by keys.
"use strict";
(() => {
  const EVERY_MS = 5000, LATE_MS = 15000, HIDDEN_MS = 60000, MOST_MS = 60000, CHARTS_MS = 60000;
  const main = document.getElementById("main"), polled = document.getElementById("polled");
  const live = document.querySelector("main [data-swap], main .charts") !== null && document.body.hasAttribute("data-live");
  let etag = null, waiting = 0, failures = 0, paused = false, current = -1, charted = Date.now(), heard = Date.now();

  // --- charts ---

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const DASHES = [[], [7, 3], [2, 3], [10, 3, 2, 3], [5, 5], [1, 4]];
  const drawn = new Map();

  const colour = (i) => css("--l" + (i % 6));

  // Points with a gap on both sides, which no line shows.
  function alone(chart, series, show) {
    const values = chart.data[series], there = (i) => typeof values[i] === "number";
    return show ? null : values.flatMap((_, i) => (there(i) && !there(i - 1) && !there(i + 1) ? [i] : []));
  }

  // Steps of an axis of whole numbers.
  const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7, 8].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

  // Of an axis: the digits that its steps need, or an exponent if all values are very small.
  function labels(chart, splits, axis, space, step) {
    let digits = 0;
    const isWhole = (scaled) => Math.abs(scaled - Math.round(scaled)) < 1e-6 * scaled;
    while (digits < 20 && !isWhole(step * 10 ** digits)) digits++;
    const plain = new Intl.NumberFormat("en", { maximumFractionDigits: digits });
    const isTiny = digits > 5 && splits.every((value) => Math.abs(value) < 1e-3);
    return splits.map((value) => (isTiny && value ? Number(value.toPrecision(9)).toExponential() : plain.format(value)));
  }

  // Of the axis of values: where all are 0, from 0 to 1.
  function range(chart, low, high) {
    return low === null ? [null, null] : low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true);
  }

  async function draw(figure, smooth) {
    const address = figure.dataset.chart + (smooth ? "&smooth=" + smooth : "");
    const answer = await fetch(address);
    if (!answer.ok) return;
    const told = await answer.json();
    let plain = 0;
    const series = told.lines.map((line) => {
      const i = line.edge ? 0 : plain++;
      return { label: line.label, stroke: line.edge ? "transparent" : colour(i), width: 2, dash: DASHES[i % 6],
               spanGaps: false, points: { show: !line.edge && line.values.filter((one) => one !== null).length < 3, filter: line.edge ? () => [] : alone } };
    });
    const edges = told.lines.flatMap((line, i) => (line.edge ? [i + 1] : []));
    const plot = figure.querySelector(".plot");
    const quiet = css("--quiet"), rule = css("--rule");
    const axis = { stroke: quiet, font: "12px system-ui, sans-serif", grid: { stroke: rule, width: 1 }, ticks: { show: false } };
    const options = {
      width: plot.clientWidth, height: figure.closest(".large") ? 340 : 190, legend: { show: false }, cursor: { y: false },
      hooks: { setCursor: [(chart) => read(figure, told, chart.cursor.idx)] }, scales: { x: { time: false, ...(told.x.length < 2 ? { range: () => [told.x[0], told.x[0] + 1] } : {}) }, y: { range } }, series: [{ label: told.x_label }, ...series], axes: [{ ...axis, size: 30, ...(told.x.every(Number.isInteger) ? { incrs: WHOLE } : {}) }, { ...axis, size: 56, values: labels }],
      bands: edges.length === 2 ? [{ series: edges, fill: css("--band") }] : [],
    };
    const data = [told.x, ...told.lines.map((line) => line.values)];
    const before = drawn.get(figure);
    if (before) before.destroy();
    plot.replaceChildren();
    const made = new uPlot(options, data, plot);
    made.root.setAttribute("role", "img");
    made.root.setAttribute("aria-label", figure.dataset.title);
    const lines = told.lines.filter((line) => !line.edge);
    figure.querySelector("[data-at]").dataset.at = told.x[told.x.length - 1];
    figure.querySelectorAll("[data-last]").forEach((one, i) => {
      const values = lines[i] ? lines[i].values : [], at = values.findLastIndex((value) => typeof value === "number");
      one.dataset.last = at < 0 ? "–" : figures.format(values[at]) + (at < values.length - 1 ? " at " + told.x[at] : "");
    });
    read(figure, told, null);
    const to = figure.dataset.point;
    // Where a finger both points and clicks, a click reads the figure and does not leave.
    if (to && matchMedia("(hover: hover)").matches) {
      let began = 0;
      made.over.style.cursor = "pointer";
      made.over.addEventListener("mousedown", (event) => { began = event.clientX; });
      made.over.addEventListener("click", (event) => {
        const i = made.cursor.idx;
        if (typeof i === "number" && Math.abs(event.clientX - began) < 4) location.href = to + told.x[i];
      });
    }
    drawn.set(figure, made);
  }

  // The legend tells the values where the pointer is, and else those of the newest step.
  const figures = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
  function read(figure, told, index) {
    const away = index === null || index === undefined, at = figure.querySelector("[data-at]");
    at.textContent = away ? at.dataset.at : told.x[index];
    const plain = told.lines.filter((line) => !line.edge);
    const band = figure.querySelector("[data-band]"), edges = told.lines.filter((line) => line.edge).map((line) => line.values[away ? told.x.length - 1 : index]);
    if (band) band.textContent = edges.filter((edge) => typeof edge === "number").sort((a, b) => a - b).map((edge) => figures.format(edge)).join(" to ");
    figure.querySelectorAll("[data-last]").forEach((one, i) => {
      const value = away || !plain[i] ? null : plain[i].values[index];
      one.textContent = away ? one.dataset.last : value === null ? "–" : figures.format(value);
    });
  }

  const seen = new IntersectionObserver((found) => {
    for (const one of found) if (one.isIntersecting) { seen.unobserve(one.target); draw(one.target, smoothing()); }
  }, { rootMargin: "200px" });

  function charts() {
    if (typeof uPlot === "undefined") return;
    for (const figure of document.querySelectorAll("[data-chart]")) seen.observe(figure);
  }

  const slider = document.querySelector("[data-smooth]");
  const smoothing = () => (slider ? slider.value : "");
  let timer = 0;
  const again = () => { clearTimeout(timer); timer = setTimeout(() => drawn.forEach((_, figure) => draw(figure, smoothing())), 150); };
  if (slider) slider.addEventListener("input", () => {
    const address = new URL(location.href);
    address.searchParams.set("smooth", slider.value);
    history.replaceState(null, "", address);
    again();
  });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; again(); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);

  // --- news ---

  function isBusy() {
    const active = document.activeElement;
    const typing = active && /^(INPUT|SELECT|TEXTAREA)$/.test(active.tagName);
    return typing || (getSelection() && !getSelection().isCollapsed);
  }

  // Puts what is new into its place. Says whether all of it is there: a region with the reader in it may have to wait.
  async function renew(text) {
    const fresh = parsed(text);
    let isWhole = true;
    for (const old of document.querySelectorAll("[data-swap]")) {
      const made = fresh.getElementById(old.id);
      if (made?.dataset.badge) old.dataset.badge = made.dataset.badge;
      if (made && old.innerHTML !== made.innerHTML) isWhole = swap(old, made) && isWhole;
    }
    const shown = document.querySelector(".charts"), now = fresh.querySelector(".charts");
    if (shown && now && addresses(shown) !== addresses(now)) await chartAnew(shown);
    else if (Date.now() - charted > CHARTS_MS) { charted = Date.now(); again(); } // many points, which seldom change much
    return isWhole;
  }

  const parsed = (text) => new DOMParser().parseFromString(text, "text/html");
  const addresses = (of) => [...of.querySelectorAll("[data-chart]")].map((one) => one.dataset.chart).join(" ");

  // There are other charts than before: what is polled names them, and the whole page has them.
  async function chartAnew(shown) {
    const answer = await fetch(location.href);
    const now = answer.ok && parsed(await answer.text()).querySelector(".charts");
    if (!now) return;
    for (const [figure, chart] of drawn) if (shown.contains(figure)) { chart.destroy(); drawn.delete(figure); }
    shown.replaceChildren(...document.adoptNode(now).childNodes);
    charts();
  }

  // A link that has the focus keeps it, and a row its mark. Where the link is gone, the reader keeps the old rows.
  function swap(old, made) {
    const active = document.activeElement, inside = old !== active && old.contains(active);
    const href = inside && active.getAttribute("href"), marked = first(rows()[current]);
    const same = href && [...made.querySelectorAll("a[href]")].find((one) => one.getAttribute("href") === href);
    if (inside && !same) return false;
    old.replaceChildren(...document.adoptNode(made).childNodes);
    if (same) same.focus({ preventScroll: true });
    if (marked) { current = rows().findIndex((row) => first(row) === marked); mark(); }
    return true;
  }

  const condition = () => document.getElementById("live-read").dataset.badge;

  // One request asks whether anything changed and brings what did: this page without its charts.
  async function poll() {
    if (!paused && !document.hidden && !isBusy()) {
      let word;
      try {
        const address = new URL(location.href);
        address.searchParams.set("live", "1");
        const answer = await fetch(address, { headers: etag ? { "If-None-Match": etag } : {}, cache: "no-store" });
        if (!answer.ok && answer.status !== 304) throw new Error(String(answer.status));
        if (answer.status === 200 && !isBusy() && (await renew(await answer.text()))) etag = answer.headers.get("etag");
        failures = 0;
        heard = Date.now();
        word = condition();
      } catch {
        failures++;
        word = failures < 3 ? "No answer, trying again" : "No answer for " + length((Date.now() - heard) / 1000) + ": has the run ended?";
      }
      if (!paused) polled.textContent = word;
      polled.classList.toggle("bad", failures >= 3);
    }
    const every = document.hidden ? HIDDEN_MS : Math.min(MOST_MS, EVERY_MS * 2 ** failures);
    clearTimeout(waiting);
    waiting = setTimeout(poll, every * (0.9 + 0.2 * Math.random()));
  }

  function tick() {
    const late = /^As of (\d+)s ago$/.exec(condition());
    const silent = Date.now() - heard, age = silent + (late ? 1000 * late[1] : 0); // an answer may be on its way for long
    if (silent >= EVERY_MS && age >= LATE_MS && !paused && !failures && (late || condition() === "Live")) polled.textContent = "As of " + length(Math.floor(age / EVERY_MS) * EVERY_MS / 1000) + " ago";
    for (const one of document.querySelectorAll("time[data-since]")) {
      one.textContent = length(Math.max(0, (heard - Date.parse(one.dateTime)) / 1000)); // as of the rest of the page
    }
  }
  function length(seconds) {
    const s = Math.floor(seconds), two = (number) => String(number).padStart(2, "0"); // as shoal/humanize.py
    if (s < 60) return s + "s";
    if (s < 3600) return Math.floor(s / 60) + "m" + two(s % 60) + "s";
    if (s < 172800) return Math.floor(s / 3600) + "h" + two(Math.floor(s % 3600 / 60)) + "m";
    return Math.floor(s / 86400) + "d" + two(Math.floor(s % 86400 / 3600)) + "h";
  }

  // --- keys ---

  const rows = () => [...main.querySelectorAll(".row, tbody tr")].filter((row) => row.querySelector("a"));
  const first = (row) => row?.querySelector("a").getAttribute("href");
  const mark = () => rows().forEach((row, i) => row.classList.toggle("current", i === current));

  function move(by) {
    const all = rows();
    if (!all.length) return;
    current = Math.min(all.length - 1, Math.max(0, current + by));
    mark();
    all[current].querySelector("a").focus();
    all[current].scrollIntoView({ block: "nearest" });
  }

  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    if (event.key === "j") move(1);
    else if (event.key === "k") move(-1);
    else if (event.key === "/") {
      const search = main.querySelector("input[type=search]");
      if (search) { search.focus(); event.preventDefault(); }
    } else if (event.key === "n") main.querySelector("a[rel=next]")?.click();
    else if (event.key === "p" && live) {
      paused = !paused;
      polled.textContent = paused ? "Paused" : condition();
      if (!paused) poll();
    }
  });

  charts();
  if (live) { polled.textContent = condition(); setInterval(tick, 1000); setTimeout(poll, 1000); document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); }); }
})();
