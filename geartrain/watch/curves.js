"use strict";
// The curves of the page: what they are made of, and how uPlot draws them.
const curves = {};  // by name: points [unix seconds, step or null, value]
const marks = [];  // events that are drawn as dashed lines
const charts = new Map();  // by figure: what it shows, and its plot
let last = null;  // what was told last
let zoom = null;  // [from, to], of time or steps, as chosen
// Between two values of an axis.
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 604800];
const STEPS = [...Array(12).keys()].flatMap(power => [1, 2, 5].map(digit => digit * 10 ** power));
const overSteps = () => $("x").value === "step";
const css = name => getComputedStyle(document.body).getPropertyValue(name);
const clock = (at, digits = 8) => new Date(at * 1000).toLocaleTimeString([], {hourCycle: "h23"}).slice(0, digits);
const day = at => new Date(at * 1000).toLocaleDateString([], {day: "numeric", month: "short"});
const when = at => last.now - at < 72000 ? clock(at) : `${day(at)} ${clock(at)}`;
const short = value => Math.abs(value) >= 1e5 ? value.toLocaleString("en", {notation: "compact"})
  : Math.abs(value) >= 1000 ? number(value) : String(Number(value.toPrecision(4)));

function thinned(points) {  // as the server does: the older, the further apart
  if (points.length < 1500) return points;
  const now = points.at(-1)[0], kept = [];
  for (const point of points.toReversed())
    if (!kept.length || point === points[0] || kept.at(-1)[0] - point[0] >= (now - point[0]) / 150) kept.push(point);
  return kept.reverse();
}
function spark(name, label) {  // a tiny SVG of the points told so far
  const told = curves[name] || [], points = told.filter((_, i) => i % Math.ceil(told.length / 100) === 0 || i === told.length - 1);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const values = points.map(point => point[2]), low = Math.min(...values), high = Math.max(...values);
  svg.setAttribute("viewBox", "0 0 100 30");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", points.length < 2 ? `${label}: no curve yet` : `${label}: between ${short(low)} and ${short(high)}`);
  const first = points[0]?.[0], span = points.at(-1)?.[0] - first || 1;
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", points.map(([at, , value]) =>
    `${(100 * (at - first) / span).toFixed(2)},${(28 - (high > low ? 26 * (value - low) / (high - low) : 0)).toFixed(2)}`).join(" "));
  svg.append(line);
  return svg;
}
// The curve `name`, drawn by uPlot. fromZero: its scale begins there. job: whose marks it has beside those of shards.
function chart(name, title, unit, {fromZero = false, job = ""} = {}) {
  const heading = make("span", {}, make("strong", {textContent: title}), unit ? ` ${unit}` : "");
  const figure = make("figure", {}, make("figcaption", {}, heading, make("output")), make("div"));
  figure.lastChild.setAttribute("role", "img");
  charts.set(figure, {name, title, unit, fromZero, job, points: [], marks: []});
  return figure;
}
function visible(name) {  // points in the chosen range; over steps, what was done again takes the place of what was lost
  const since = $("range").value > 0 ? last.now - $("range").value : 0;
  const points = (curves[name] || []).filter(point => point[0] >= since);
  if (!overSteps() || points.some(point => point[1] == null)) return [points, 0];
  const kept = [];
  for (const point of points) {
    while (kept.length && kept.at(-1)[1] >= point[1]) kept.pop();
    kept.push(point);
  }
  return [kept, 1];
}
function smoothed(values) {  // a mean that forgets, as TensorBoard's
  const kept = Number($("smooth").value);
  let sum = 0, weight = 0;
  return values.map(value => { sum = kept * sum + (1 - kept) * value; weight = kept * weight + 1 - kept; return sum / weight; });
}
function scaleOf(values, fromZero) {  // [from, to, how many values are outside]
  if (!values.length) return [0, 1, 0];
  const sorted = [...values].sort((a, b) => a - b), at = share => sorted[Math.round(share * (sorted.length - 1))];
  const spread = 2 * (at(0.9) - at(0.1));
  let [low, high] = [sorted[0], sorted.at(-1)];
  if (spread && values.length >= 20 && $("scale").value === "usual")
    [low, high] = [Math.max(low, at(0.1) - spread), Math.min(high, at(0.9) + spread)];
  if (fromZero) low = 0;
  const outside = values.filter(value => value < low || value > high).length;
  const room = 0.06 * (high - low) || Math.abs(high) / 10 || 1;
  return [fromZero ? 0 : low - room, high + room, outside];
}
function draw(figure) {
  const of = charts.get(figure), [caption, box] = figure.children, [points, x] = visible(of.name);
  const values = points.map(point => point[2]), xs = points.map(point => point[x]);
  const [from, to] = zoom && Boolean(x) === overSteps() ? zoom : [xs[0] ?? 0, xs.at(-1) ?? 0];
  const inside = values.filter((_, i) => xs[i] >= from && xs[i] <= to), [low, high, outside] = scaleOf(inside, of.fromZero);
  const at = mark => x ? points.find(point => point[0] >= mark.at)?.[1] : mark.at;
  of.marks = marks.filter(mark => !mark.job || mark.job === of.job).map(mark => ({...mark, x: at(mark)})).filter(mark => mark.x >= from && mark.x <= to);
  of.now = (values.length ? `now ${short(values.at(-1))}` : "none for so long") + (outside ? ` · ${outside} off the scale` : "");
  Object.assign(of, {points, isOfSteps: Boolean(x), x: from < to ? [from, to] : [from - 1, from + 1], y: [low, high]});
  figure.hidden = !curves[of.name];
  if (!of.isHovered) say(caption.lastChild, of.now);
  const range = `between ${short(Math.min(...inside))} and ${short(Math.max(...inside))}, ${of.now}`, marked = of.marks.map(mark => `; ${mark.kind} at ${when(mark.at)}`).join("");
  box.setAttribute("aria-label", values.length < 2 ? `${of.title}: no curve yet` : `${of.title} ${of.unit} over ${x ? "steps" : "time"}: ${range}${marked}`);
  const size = {width: box.clientWidth, height: parseInt(getComputedStyle(box).minHeight)};
  if (!size.width) return;
  of.plot ||= plotOf(of, box, size, text => say(caption.lastChild, text));
  if (of.plot.width !== size.width || of.plot.height !== size.height) of.plot.setSize(size);
  of.plot.setData([xs, Number($("smooth").value) ? values : values.map(() => null), smoothed(values)]);
}
function plotOf(of, box, size, tell) {
  const axis = {stroke: () => css("--soft"), grid: {stroke: () => css("--line"), width: 1}, ticks: {show: false}, font: "11px system-ui, sans-serif"};
  const tick = (at, step) => !of.points.length ? "" : of.isOfSteps ? number(at) : step < 86400 ? clock(at, step < 60 ? 8 : 5) : day(at);
  const line = {stroke: () => css("--accent")};
  const plot = new uPlot({
    ...size, legend: {show: false}, padding: [8, 10, 0, 0], cursor: {y: false, drag: {setScale: false}},
    scales: {x: {time: false, range: () => of.x}, y: {range: () => of.y}},
    axes: [
      {...axis, size: 24, space: 80, incrs: () => of.isOfSteps ? STEPS : SECONDS, values: (_, splits, axis, space, step) => splits.map(at => tick(at, step))},
      {...axis, size: 52, space: 30, values: (_, splits) => splits.map(short)},
    ],
    series: [{}, {...line, width: 1, alpha: 0.35, points: {show: false}}, {...line, width: 2, points: {size: 7, show: () => of.points.length === 1}}],
    hooks: {
      setCursor: [plot => {
        const point = plot.cursor.left >= 0 ? of.points[plot.cursor.idx] : null;
        of.isHovered = Boolean(point);
        if (!point) return tell(of.now);
        const mark = of.marks.find(mark => Math.abs(plot.valToPos(mark.x, "x") - plot.cursor.left) < 6);
        tell(mark ? `${when(mark.at)} ${mark.text}` : `${point[1] == null ? "" : `step ${number(point[1])} · `}${when(point[0])} · ${short(point[2])}`);
      }],
      setSelect: [plot => {
        const {left, width} = plot.select;
        if (width < 5) return;
        zoom = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
        plot.setSelect({left: 0, width: 0}, false);
        drawAll();
      }],
      draw: [plot => drawMarks(plot, of.marks)],
    },
  }, [[], [], []], box);
  plot.over.ondblclick = unzoom;
  return plot;
}
function drawMarks({ctx, bbox, valToPos}, all) {
  let free = bbox.left;  // of names that are written already
  ctx.save();
  ctx.textAlign = "left";
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const {x, kind} of all) {
    const left = Math.round(valToPos(x, "x", true)), width = ctx.measureText(kind).width;
    ctx.strokeStyle = ctx.fillStyle = css(kind === "lost" ? "--bad" : "--wait");
    ctx.beginPath();
    ctx.moveTo(left, bbox.top);
    ctx.lineTo(left, bbox.top + bbox.height);
    ctx.stroke();
    const start = left + width + 4 < bbox.left + bbox.width ? left + 4 : left - width - 4;
    if (start < free) continue;
    ctx.fillText(kind, start, bbox.top + 10 * devicePixelRatio);
    free = start + width;
  }
  ctx.restore();
}
function drawAll(inSight = false) {  // inSight: no others
  $("unzoom").hidden = !zoom;
  if (!last || document.hidden) return;
  for (const [figure, {plot}] of charts) {
    const {top, bottom} = figure.getBoundingClientRect();
    if (!figure.isConnected) { plot?.destroy(); charts.delete(figure); }
    else if (inSight !== true || !plot || (bottom > 0 && top < innerHeight)) draw(figure);
  }
}
function unzoom() {
  zoom = null;
  drawAll();
}
