/* Colours: those of the style sheet, of streams (Okabe and Ito, 2008) and of scales. */
import { el } from "./tools.js";

const STREAMS = {
  light: ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#e8d92f", "#8a8f92"],
  dark: ["#3f9ad3", "#e8ab26", "#22b58b", "#d68fb7", "#7cc6ef", "#e5793a", "#e9de5c", "#9aa1a5"],
};
/** From little to much after ColorBrewer's YlOrBr: lightness alone tells the steps apart. */
const HEAT = {
  light: ["#fbe7b2", "#fdcb62", "#fba63a", "#ee8020", "#d2600f", "#a34004", "#6b2a06"],
  dark: ["#4a2c0c", "#713d0a", "#9c4f0a", "#cb6a16", "#ee9136", "#fcbf66", "#ffe9ae"],
};
export const ink = (hex) => {
  const [r, g, b] = [1, 3, 5].map((at) => { const c = parseInt(hex.slice(at, at + 2), 16) / 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.19 ? "#10181b" : "#ffffff";
};
/** Upper bounds, round and rising, of at most seven steps that tell ``values`` apart; the lowest holds all below it. */
export const boundsOf = (values) => {
  const sorted = Float64Array.from(values.filter((value) => value > 0)).sort(), most = sorted[sorted.length - 1], least = sorted[Math.floor(sorted.length / 20)];
  let bounds = [];
  for (const steps of sorted.length ? [[1, 1.5, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]] : []) {
    bounds = [];
    for (let decade = Math.floor(Math.log10(least)); !(bounds[bounds.length - 1] >= most); decade++) {
      for (const step of steps) { const bound = Number((step * 10 ** decade).toPrecision(2)); if (bound >= least && !(bounds[bounds.length - 1] >= most)) bounds.push(bound); }
    }
    if (bounds.length <= 7) break;
  }
  return bounds.slice(-7);
};
const STRIPES = (mark) => [null, `repeating-linear-gradient(135deg,${mark} 0 2px,transparent 2px 6px)`, `radial-gradient(${mark} 28%,transparent 32%) 0 0/6px 6px`, `repeating-linear-gradient(90deg,${mark} 0 2px,transparent 2px 6px)`];
/** The colours of one viewer; ``themed`` is the element whose ``data-theme`` and custom properties say which. */
export function createTheme(themed) {
  const theme = {
    get dark() { return themed.dataset.theme === "dark"; },
    value(name) { return (this.cache[name] ??= getComputedStyle(themed).getPropertyValue(`--${name}`).trim()); },
    cache: {},
    stream(index) { return STREAMS[this.dark ? "dark" : "light"][index % 8]; },
    /** Step ``at`` of ``steps``, spread over the whole scale; one alone is in its middle. */
    heat(at, steps) { return HEAT[this.dark ? "dark" : "light"][steps > 1 ? Math.round((6 * at) / (steps - 1)) : 3]; },
  };
  const patterns = {};
  /** A ground with marks on it, in tiles, made once. */
  const patterned = (context, ground, mark, thick, draw) => {
    const key = `${ground}${draw.name}`;
    if (!patterns[key]) {
      const tile = el("canvas", { width: 8, height: 8 }), paint = tile.getContext("2d");
      paint.fillStyle = ground; paint.fillRect(0, 0, 8, 8);
      paint.strokeStyle = paint.fillStyle = mark; paint.lineWidth = thick;
      paint.beginPath(); draw(paint); paint.stroke();
      patterns[key] = context.createPattern(tile, "repeat");
    }
    return patterns[key];
  };
  const stripes = (paint) => { for (const at of [-8, 0, 8]) { paint.moveTo(at - 2, 10); paint.lineTo(at + 10, -2); } };
  const dots = (paint) => { paint.arc(4, 4, 1.8, 0, 7); paint.fill(); paint.beginPath(); };
  const bars = (paint) => { paint.moveTo(4, 0); paint.lineTo(4, 8); };
  /** Beyond eight streams the colours come round again, with stripes, dots, bars: never colour alone. */
  const streamFill = (context, index) => {
    const colour = theme.stream(index), draw = [null, stripes, dots, bars][Math.floor(index / 8) % 4];
    return draw ? patterned(context, colour, theme.dark ? "rgba(0,0,0,.5)" : "rgba(255,255,255,.65)", 1.8, draw) : colour;
  };
  /** What has no value: hatched. */
  const unknownFill = (context) => patterned(context, theme.value("sunken"), theme.value("line-strong"), 1.2, stripes);
  const streamChip = (stream) => {
    const colour = theme.stream(stream), stripes = STRIPES(theme.dark ? "rgba(0,0,0,.5)" : "rgba(255,255,255,.65)")[Math.floor(stream / 8) % 4];
    const number = el("b", { style: `background:${colour}` }, stream);
    return el("span", { class: "nv-stream", style: `background:${stripes ? `${stripes},` : ""}${colour};color:${ink(colour)}`, title: `stream ${stream}` }, number);
  };
  const repaint = () => { theme.cache = {}; for (const key of Object.keys(patterns)) delete patterns[key]; };
  return { theme, streamFill, unknownFill, streamChip, repaint };
}
