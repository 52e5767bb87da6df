"use strict";
// Everything a model or a dataset wrote goes in through textContent: none of it can become markup.

const $ = (id) => document.getElementById(id);
const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};
const drawn = (tag, attributes = {}, text) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
};
const number = (v) => {
  if (v === null || v === undefined) return "–";
  const size = Math.abs(v);
  if (size >= 1e6) return (v / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return (v / 1e3).toPrecision(3) + "k";
  if (size !== 0 && size < 1e-3) return v.toExponential(1).replace("-", "−");
  return String(Number(v.toPrecision(3))).replace("-", "−");
};
const nats = (h) => (h === null ? "–" : h <= -1e6 ? "−∞" : h >= 1e6 ? "∞" : (h / 100).toFixed(2).replace("-", "−"));
const signed = (h) => (h > 0 ? "+" : "") + nats(h);
const visible = (text) => (text === "" ? "∅" : text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ | $/g, "␣"));

// ---- Light and dark

const stored = (() => {
  try { return window.localStorage; } catch { return null; } // refused to some pages opened as files
})();
const setTheme = (dark) => document.documentElement.classList.toggle("dark", dark);
const system = matchMedia("(prefers-color-scheme: dark)");
const chosenTheme = stored?.getItem("theme");
setTheme(chosenTheme ? chosenTheme === "dark" : system.matches);
system.addEventListener("change", () => stored?.getItem("theme") || setTheme(system.matches));
$("theme").addEventListener("click", () => {
  setTheme(!document.documentElement.classList.contains("dark"));
  stored?.setItem("theme", document.documentElement.classList.contains("dark") ? "dark" : "light");
});

// ---- Samples

let data, chosen = 0, moved = false, limit = 1;

function choose(index) {
  const steps = data.samples.steps;
  chosen = Math.max(0, Math.min(steps.length - 1, index));
  $("step").value = chosen;
  $("step-now").textContent = steps.length ? `${steps[chosen].step} of ${lastStep()}` : "–";
  $("step").setAttribute("aria-valuetext", steps.length ? `step ${steps[chosen].step}` : "none");
  hideTip();
  const shown = steps.length ? steps[chosen].samples : [];
  $("sample-list").replaceChildren(...shown.map(sampleCard));
  if (!shown.length) $("sample-list").append(make("p", { class: "note" }, "There are no samples: this run was recorded without a report."));
  fillWorst(shown);
  fillStops(shown);
  redrawMarks();
}

function tokenSpan(sample, i) {
  const trained = !sample.trained || sample.trained[i];
  const advantage = sample.a[i] ?? 0;
  const kind = !trained ? "off" : advantage > 0.5 ? "up" : advantage < -0.5 ? "down" : "";
  const span = make("span", { class: `tok ${kind}`, tabindex: "-1", "data-i": i, "aria-describedby": "tip" });
  span.style.setProperty("--w", Math.min(1, Math.sqrt(Math.abs(advantage) / limit)).toFixed(2));
  span.textContent = data.samples.texts[sample.tokens[i]];
  return span;
}

function sampleCard(sample, number) {
  const text = make("p", { class: "text mono", dir: "auto" }, make("span", { class: "prompt" }, sample.prompt));
  const spans = sample.tokens.map((_, i) => tokenSpan(sample, i));
  if (spans.length) spans[0].tabIndex = 0;
  text.append(...spans);
  if (sample.length > spans.length) text.append(make("span", { class: "cut" }, ` … and ${sample.length - spans.length} more tokens`));
  text.addEventListener("keydown", (event) => moveAmong(spans, event));
  for (const kind of ["pointerover", "focusin"])
    text.addEventListener(kind, (event) => {
      const span = event.target.closest(".tok");
      if (span) showTip(span, sample, Number(span.dataset.i));
    });
  for (const kind of ["pointerleave", "focusout"]) text.addEventListener(kind, hideTip);
  text.addEventListener("scroll", hideTip);
  const total = sample.a.reduce((sum, a) => sum + (a ?? 0), 0);
  const meta = make("div", { class: "meta" },
    make("span", { class: "badge" }, sample.stopped ? "stopped" : "cut at the limit"),
    make("span", {}, `${sample.length} tokens`), make("span", {}, `mean advantage ${signed(total / Math.max(1, sample.a.length))}`));
  if (sample.reward) meta.append(make("span", {}, `of it by reward ${signed(sample.reward)}`));
  if (sample.dataset !== "train") meta.append(make("span", { dir: "auto" }, sample.dataset));
  return make("article", { class: "sample", "aria-label": `Sample ${number + 1}` }, meta, text);
}

function moveAmong(spans, event) {
  const at = spans.indexOf(document.activeElement);
  const next = { ArrowRight: at + 1, ArrowDown: at + 8, ArrowLeft: at - 1, ArrowUp: at - 8, Home: 0, End: spans.length - 1 }[event.key];
  if (event.key === "Escape") hideTip();
  if (at < 0 || next === undefined) return;
  event.preventDefault();
  focusToken(spans, Math.max(0, Math.min(spans.length - 1, next)));
}

function focusToken(spans, at) {
  spans.forEach((span) => (span.tabIndex = -1));
  spans[at].tabIndex = 0;
  spans[at].focus({ preventScroll: false });
}

const pair = (name, value) => make("tr", {}, make("td", {}, make("span", { class: "piece" }, name)), make("td", {}, value));

function showTip(span, sample, i) {
  const tip = $("tip");
  const likely = (h) => (h === null ? "–" : `${nats(h)} (${(100 * Math.exp(h / 100)).toPrecision(2)}%)`);
  const off = sample.trained && !sample.trained[i];
  tip.replaceChildren(
    make("div", { class: "which mono piece" }, visible(span.textContent)),
    off ? make("div", {}, "Not trained on: the student did not sample it, or its completion is masked.") :
    make("table", {}, make("tbody", {}, pair("student's log-prob", likely(sample.s[i])),
      pair("teacher's log-prob", likely(sample.q[i])), pair("advantage", signed(sample.a[i])))));
  if (sample.top?.[i]?.length) {
    const rows = sample.top[i].map((t, k) => pair(visible(data.samples.texts[t]), likely(sample.toplogps[i][k])));
    tip.append(make("div", { class: "head" }, "The teacher's likeliest tokens"), make("table", { class: "mono" }, make("tbody", {}, ...rows)));
  } else if (!sample.top) tip.append(make("div", { class: "head" }, "The teacher's alternatives were not asked for (a server)."));
  tip.hidden = false;
  const at = span.getClientRects()[0], own = tip.getBoundingClientRect();
  const below = at.bottom + 8 + own.height < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(innerWidth - own.width - 8, at.left))}px`;
  tip.style.top = `${Math.max(8, below ? at.bottom + 8 : at.top - own.height - 8)}px`;
}
function hideTip() { $("tip").hidden = true; }

function fillWorst(samples) {
  const all = samples.flatMap((sample, n) => sample.a.map((a, i) => ({ sample, n, i, a: a ?? 0 })));
  const worst = all.filter((x) => x.a < 0).sort((x, y) => x.a - y.a).slice(0, 10);
  const head = make("tr", {}, ...["advantage", "token", "after", "student", "teacher"].map((h, i) => make("th", i === 1 || i === 2 ? {} : { class: "num" }, h)));
  const rows = worst.map(({ sample, n, i, a }) => {
    const go = make("button", { type: "button", class: "mono" }, visible(data.samples.texts[sample.tokens[i]]));
    go.addEventListener("click", () => {
      const spans = [...document.querySelectorAll(".sample")[n].querySelectorAll(".tok")];
      focusToken(spans, i);
      spans[i].scrollIntoView({ block: "center" });
      requestAnimationFrame(() => showTip(spans[i], sample, i));
    });
    const before = (i ? "" : sample.prompt.slice(-24)) + sample.tokens.slice(Math.max(0, i - 4), i).map((t) => data.samples.texts[t]).join("");
    return make("tr", {}, make("td", { class: "num" }, signed(a)), make("td", {}, go), make("td", { class: "mono piece" }, visible(before)),
      make("td", { class: "num" }, nats(sample.s[i])), make("td", { class: "num" }, nats(sample.q[i])));
  });
  $("worst").replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
}

function fillStops(samples) {
  const step = data.samples.steps[chosen]?.step;
  const whole = data.rollouts.filter((r) => r.step <= step).at(-1);
  const head = make("tr", {}, ...["", "ended", "student", "teacher"].map((h, i) => make("th", i > 1 ? { class: "num" } : {}, h)));
  const rows = [];
  if (whole) rows.push(make("tr", {}, make("td", {}, "whole rollout, mean"), make("td", {}, `${whole.stop.stopped} of ${whole.stop.completions} stopped`),
    make("td", { class: "num" }, number(whole.stop.student)), make("td", { class: "num" }, number(whole.stop.teacher))));
  samples.forEach((sample, n) => {
    const end = sample.tokens.length - 1, told = sample.stopped && sample.length === sample.tokens.length && end >= 0;
    rows.push(make("tr", {}, make("td", {}, `sample ${n + 1}`), make("td", { class: "mono" }, sample.stopped ? (told ? visible(data.samples.texts[sample.tokens[end]]) : "stopped") : "cut"),
      make("td", { class: "num" }, told ? nats(sample.s[end]) : "–"), make("td", { class: "num" }, told ? nats(sample.q[end]) : "–")));
  });
  $("stops").replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
}

// ---- Charts

const LEFT = 44, RIGHT = 6, TOP = 8, BOTTOM = 20, HEIGHT = 168;
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "1 2", "10 4"];
const lastStep = () => Math.max(1, ...Object.values(data.curves).map((c) => c.at(-1)[0]), ...data.samples.steps.map((s) => s.step));
let marks = [], charts = [];

function ticks(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let v = Math.ceil(low / size - 1e-9) * size; v <= high + size * 1e-9; v += size) found.push(Math.abs(v) < size / 1e6 ? 0 : v);
  return found;
}

function frame(svg, { xs, ys }) {
  const width = svg.clientWidth || 320;
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const x = (v) => LEFT + ((v - xs[0]) / (xs[1] - xs[0] || 1)) * (width - LEFT - RIGHT);
  const y = (v) => HEIGHT - BOTTOM - ((v - ys[0]) / (ys[1] - ys[0] || 1)) * (HEIGHT - TOP - BOTTOM);
  for (const v of ticks(...ys, 4)) {
    svg.append(drawn("line", { x1: LEFT, x2: width - RIGHT, y1: y(v), y2: y(v), stroke: v === 0 ? "var(--line)" : "var(--grid)" }));
    svg.append(drawn("text", { x: LEFT - 6, y: y(v) + 4, "text-anchor": "end" }, number(v)));
  }
  return { x, y, width };
}

function legendOf(series, values, box) {
  return series.map((s, i) => {
    const mark = make("i", box ? { class: "box" } : {});
    if (box) mark.style.background = s.color;
    else { mark.style.borderTopColor = s.color; mark.style.borderTopStyle = i ? (i % 2 ? "dashed" : "dotted") : "solid"; }
    return make("span", {}, mark, `${s.name} `, make("b", {}, number(values[i])));
  });
}

const at = (points, step) => points.reduce((best, p) => (Math.abs(p[0] - step) < Math.abs(best[0] - step) ? p : best), points[0]);

function card(title, unit, note, draw) {
  const svg = drawn("svg", { role: "img", "aria-label": title, preserveAspectRatio: "none" });
  const legend = make("div", { class: "legend" });
  $("charts").append(make("figure", { class: "card" }, make("h3", {}, title, make("span", { class: "unit" }, unit ? ` · ${unit}` : "")),
    svg, legend, make("figcaption", { class: "note" }, note)));
  charts.push(() => { svg.replaceChildren(); draw(svg, legend); });
}

function curves(title, unit, note, wanted, { from0 = false } = {}) {
  const series = wanted.filter(([name]) => data.curves[name]?.length).slice(0, 6)
    .map(([name, label], i) => ({ name: label, points: data.curves[name], color: `var(--c${i})` }));
  if (!series.length) return;
  card(title, unit, note, (svg, legend) => {
    const values = series.flatMap((s) => s.points.map((p) => p[1]));
    let low = Math.min(...values), high = Math.max(...values);
    if (from0) low = Math.min(0, low);
    if (high - low < Math.abs(high) * 1e-3) { low -= Math.abs(low) * 0.1 + 1e-9; high += Math.abs(high) * 0.1 + 1e-9; }
    const f = frame(svg, { xs: [0, lastStep()], ys: [low, high] });
    stepAxis(svg, f);
    series.forEach((s, i) => {
      const path = s.points.map((p, k) => `${k ? "L" : "M"}${f.x(p[0]).toFixed(1)} ${f.y(p[1]).toFixed(1)}`).join("");
      svg.append(drawn("path", { d: path, fill: "none", stroke: s.color, "stroke-width": 2, "stroke-linejoin": "round", "stroke-dasharray": DASHES[i] }));
      if (s.points.length < 12) s.points.forEach((p) => svg.append(drawn("circle", { cx: f.x(p[0]), cy: f.y(p[1]), r: 2.5, fill: s.color })));
    });
    const say = (step) => legend.replaceChildren(...legendOf(series, series.map((s) => at(s.points, step)[1])));
    follow(svg, f, say);
  });
}

function stepAxis(svg, f) {
  for (const v of ticks(0, lastStep(), 5)) if (Number.isInteger(v)) svg.append(drawn("text", { x: f.x(v), y: HEIGHT - 4, "text-anchor": "middle" }, number(v)));
}

// The line of the chosen step; while the pointer is in the chart, the values under it.
function follow(svg, f, say) {
  const line = drawn("line", { y1: TOP, y2: HEIGHT - BOTTOM, stroke: "var(--ink)", "stroke-opacity": 0.45 });
  svg.append(line);
  const put = (step) => { line.setAttribute("x1", f.x(step)); line.setAttribute("x2", f.x(step)); say(step); };
  const current = () => put(data.samples.steps[chosen]?.step ?? lastStep());
  const under = (event) => {
    const box = svg.getBoundingClientRect();
    return Math.max(0, Math.min(1, ((event.clientX - box.left) * (f.width / box.width) - LEFT) / (f.width - LEFT - RIGHT))) * lastStep();
  };
  svg.onpointermove = (event) => put(under(event));
  svg.onpointerleave = current;
  svg.onclick = (event) => {
    const step = under(event), steps = data.samples.steps;
    moved = true;
    choose(steps.reduce((best, s, i) => (Math.abs(s.step - step) < Math.abs(steps[best].step - step) ? i : best), 0));
  };
  marks.push(current);
  current();
}

function timeBars() {
  const phases = Object.keys(data.curves).filter((name) => name.startsWith("time/") && name !== "time/window").map((name) => name.slice(5));
  const whole = data.curves.seconds;
  if (!phases.length) return;
  const order = ["rollout", "teacher", "train", "sync", "eval", "report"].filter((p) => phases.includes(p));
  phases.filter((p) => !order.includes(p)).forEach((p) => order.push(p));
  if (whole) order.push("other");
  const series = order.map((name, i) => ({ name, color: `var(--c${i % 6})` }));
  const steps = [...new Set((whole ?? data.curves[`time/${phases[0]}`]).map((p) => p[0]))];
  const lookup = Object.fromEntries(phases.map((p) => [p, new Map(data.curves[`time/${p}`])]));
  const wholes = new Map(whole ?? []);
  const bars = steps.map((step) => {
    const parts = order.map((p) => (p === "other" ? 0 : lookup[p].get(step) ?? 0));
    const sum = parts.reduce((a, b) => a + b, 0);
    if (whole) parts[order.length - 1] = Math.max(0, wholes.get(step) - sum);
    return { step, parts };
  });
  card("Where the time went", "seconds between logs", "Rollouts usually lead: a larger batch, a shorter limit or vLLM shortens them. Other: optimizer, data, checkpoints.", (svg, legend) => {
    const high = Math.max(...bars.map((b) => b.parts.reduce((a, v) => a + v, 0)));
    const f = frame(svg, { xs: [0, lastStep()], ys: [0, high] });
    stepAxis(svg, f);
    const shown = bars.length > 120 ? bars.filter((_, i) => i % Math.ceil(bars.length / 120) === 0) : bars;
    const width = Math.max(1.5, ((f.width - LEFT - RIGHT) / (shown.length + 1)) * 0.8);
    for (const bar of shown) {
      let base = 0;
      bar.parts.forEach((v, i) => {
        if (v > 0) svg.append(drawn("rect", { x: f.x(bar.step) - width, width, y: f.y(base + v), height: Math.max(0, f.y(base) - f.y(base + v)), fill: series[i].color }));
        base += v;
      });
    }
    const say = (step) => legend.replaceChildren(...legendOf(series, bars.reduce((best, b) => (Math.abs(b.step - step) < Math.abs(best.step - step) ? b : best)).parts, true));
    follow(svg, f, say);
  });
}

function byPosition() {
  const rollouts = data.rollouts.filter((r) => r.position.length);
  if (!rollouts.length) return;
  card("Teacher KL by place in the completion", "nats per token",
    "Main process. High at the first places only: prompts or templates differ. Rising towards the end: errors add up, or the student does not stop.", (svg, legend) => {
    const redraw = () => {
      svg.replaceChildren();
      const step = data.samples.steps[chosen]?.step ?? Infinity;
      const lines = [["first rollout", rollouts[0]], ["chosen step", rollouts.filter((r) => r.step <= step).at(-1) ?? rollouts[0]], ["last rollout", rollouts.at(-1)]]
        .map(([name, r], i) => ({ name, color: `var(--c${[4, 0, 1][i]})`, points: r.position.map(([place, sum, count]) => [Math.log2(place + 1), sum / count]) }));
      const values = lines.flatMap((l) => l.points.map((p) => p[1])), bins = Math.max(1, ...lines.flatMap((l) => l.points.map((p) => p[0])));
      const f = frame(svg, { xs: [0, bins], ys: [Math.min(0, ...values), Math.max(...values)] });
      for (let b = 0; b <= bins; b++) svg.append(drawn("text", { x: f.x(b), y: HEIGHT - 4, "text-anchor": b === bins ? "end" : "middle" }, String(2 ** b)));
      lines.forEach((l, i) => {
        svg.append(drawn("path", { d: l.points.map((p, k) => `${k ? "L" : "M"}${f.x(p[0])} ${f.y(p[1])}`).join(""), fill: "none", stroke: l.color, "stroke-width": 2, "stroke-dasharray": ["2 3", "", "6 3"][i] }));
        l.points.forEach((p) => svg.append(drawn("circle", { cx: f.x(p[0]), cy: f.y(p[1]), r: 2.5, fill: l.color })));
      });
      legend.replaceChildren(...lines.map((l, i) => {
        const mark = make("i");
        mark.style.borderTopColor = l.color; mark.style.borderTopStyle = ["dotted", "solid", "dashed"][i];
        return make("span", {}, mark, l.name);
      }));
    };
    marks.push(redraw);
    redraw();
  });
}

function redrawMarks() { marks.forEach((mark) => mark()); }
function drawCharts() { marks = []; charts.forEach((draw) => draw()); }

function addCharts() {
  const under = (prefix) => Object.keys(data.curves).filter((name) => name.startsWith(prefix) && !name.endsWith("/p99")).map((name) => [name, name.slice(prefix.length)]);
  curves("Teacher KL", "nats per token", "The objective: mean of student minus teacher log-prob. Should fall, then flatten. About 0 at step 1: the two are the same model.", [["teacher_kl", "all tokens"], ["divergence", "divergence"]], { from0: true });
  curves("Teacher KL by dataset or teacher", "nats per token", "Which is still far from its teacher.", under("teacher_kl/"), { from0: true });
  byPosition();
  curves("Held-out teacher KL", "nats per token", "Should fall with training's. Rising while that falls: it learns its prompts by heart.", Object.keys(data.curves).filter((n) => /^eval_.*teacher_kl$/.test(n)).map((n) => [n, n.slice(5)]), { from0: true });
  curves("Evaluation", "own figures", "What your evaluators and reward functions say of held-out prompts.", Object.keys(data.curves).filter((n) => n.startsWith("eval_") && !/teacher_kl|completions|prompts|runtime|per_second|tools|time/.test(n)).map((n) => [n, n.slice(5)]));
  curves("Reward", "mean", "Should rise if it has a weight.", [["reward", "weighted"], ...under("reward/")]);
  curves("How completions end", "share", "Stopping should come to the teacher's rate. Truncation over half: raise max_completion_length.", [["completions/stopped_fraction", "stopped"], ["completions/truncated_fraction", "cut at the limit"]], { from0: true });
  curves("Completion length", "tokens", "Steady growth up to the limit: the student forgets to stop.", [["completions/mean_length", "mean"], ["completions/max_length", "longest"], ["completions/min_length", "shortest"]], { from0: true });
  const stop = data.rollouts.filter((r) => r.stop.student !== null);
  data.curves["stop/student"] = stop.map((r) => [r.step, r.stop.student]);
  data.curves["stop/teacher"] = stop.map((r) => [r.step, r.stop.teacher]);
  for (const name of ["stop/student", "stop/teacher"]) if (!data.curves[name].length) delete data.curves[name];
  curves("Log-prob of the stop token", "nats, where it was written", "The two should come together. The teacher's far below: it ends its turns with another token.", [["stop/student", "student"], ["stop/teacher", "teacher"]]);
  curves("Entropy", "nats", "Falls towards the teacher's. Near 0 while the KL stays: the student repeats itself.", [["entropy", "student"]], { from0: true });
  curves("Importance ratio", "current ÷ sampling policy", "Mean about 1. A largest ratio of tens: use loss_fn ppo or cispo, or fewer substeps.", [["ratio/mean", "mean"], ["ratio/max", "largest"], ["ratio/ess", "effective share of the sample"]]);
  curves("Loss carried by 1% of the tokens", "share of Σ|A|", "0.01 if all count alike. Over a half, a handful is the whole gradient: kl_clip.", [["advantage/top1pct_share", "top 1%"]], { from0: true });
  curves("Speed", "trained tokens per second", "Steady. Falling: completions grow, or the machine is shared.", [["tokens_per_second", "tokens/s"]], { from0: true });
  timeBars();
  curves("Memory", "GB", "Main process. Flat after the first steps; steady growth is a leak.", [["memory/process", "process"], ["memory/GPU peak", "GPU peak"]], { from0: true });
}

function summary() {
  const last = (name) => data.curves[name]?.at(-1)?.[1], first = (name) => data.curves[name]?.[0]?.[1];
  const arrow = (name) => `${number(first(name))} → ${number(last(name))}`;
  const facts = [["steps", `${lastStep()}${data.facts.steps > lastStep() ? " of " + data.facts.steps : ""}`]];
  if (data.curves.teacher_kl) facts.push(["teacher KL, nats per token", arrow("teacher_kl")]);
  if (data.curves.eval_teacher_kl) facts.push(["held-out teacher KL", arrow("eval_teacher_kl")]);
  if (data.curves.reward) facts.push(["reward", arrow("reward")]);
  if (data.curves["completions/stopped_fraction"]) facts.push(["completions that stop", arrow("completions/stopped_fraction")]);
  if (data.curves.tokens) facts.push(["tokens trained on", number(last("tokens"))]);
  $("summary").replaceChildren(...facts.map(([name, value]) => make("div", { class: "fact" }, make("b", {}, value), make("span", {}, name))));
}

// ---- Start

async function unpack(base64) {
  const bytes = Uint8Array.from(atob(base64.trim()), (c) => c.charCodeAt(0));
  return JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
}

function watchServer(version) {
  setInterval(async () => {
    const answer = await fetch("/version").catch(() => null); // the server may be gone for good: the page stays as it is
    if (!answer?.ok || (await answer.text()) === version) return;
    sessionStorage.setItem("place", JSON.stringify({ y: scrollY, step: moved ? data.samples.steps[chosen]?.step : null }));
    location.reload();
  }, 2000);
}

async function start() {
  data = await unpack($("data").textContent);
  const steps = data.samples.steps;
  const sizes = steps.flatMap((s) => s.samples.flatMap((x) => x.a.map((a) => Math.abs(a ?? 0)))).filter(Boolean).sort((a, b) => a - b);
  limit = sizes[Math.floor(sizes.length * 0.98)] || 1; // one scale for all steps, so that a run that learns grows pale
  const version = document.querySelector("meta[name=report-version]").content;
  const place = version && JSON.parse(sessionStorage.getItem("place") ?? "null");
  if (version) sessionStorage.removeItem("place");
  $("step").max = Math.max(0, steps.length - 1);
  $("step").disabled = steps.length < 2;
  $("step").addEventListener("input", () => { moved = true; choose(Number($("step").value)); });
  summary();
  addCharts();
  drawCharts();
  const kept = place && place.step !== null ? steps.findIndex((s) => s.step === place.step) : -1;
  moved = kept >= 0;
  choose(kept >= 0 ? kept : steps.length - 1);
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawCharts(); } });
  addEventListener("scroll", hideTip, { passive: true });
  if (place) scrollTo({ top: place.y, behavior: "instant" });
  if (version) watchServer(version);
  document.documentElement.dataset.ready = "yes";
}
start();
