// Draws the charts from the JSON in the page, in the colors of the page's style, anew when light and dark change.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const narrow = window.matchMedia("(max-width: 600px)");
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const touch = window.matchMedia("(pointer: coarse)");

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function axis(more) {
  return Object.assign({
    gridcolor: color("line"), linecolor: color("line"), zeroline: false, automargin: true, fixedrange: touch.matches,
    title: { font: { size: 12, color: color("muted") }, standoff: 8 },
  }, more);
}

function layout(height, more) {
  return Object.assign({
    height,
    margin: { l: 48, r: 12, t: 28, b: 40 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("muted") },
    hoverlabel: { bgcolor: color("surface"), bordercolor: color("line"), font: { color: color("text") } },
    hovermode: "x unified",
    // A finger that drags scrolls the page.
    dragmode: touch.matches ? false : "zoom",
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: color("text") } },
    showlegend: true,
  }, more);
}

function line(series, paint, more) {
  return Object.assign({
    type: "scatter", mode: series.x.length > 1 ? "lines" : "markers", name: series.name, x: series.x, y: series.y,
    line: { color: paint, width: 1.75 }, marker: { color: paint },
  }, more);
}

// Few stages get colors of their own, many a ramp from the first to the last.
function stageColor(index, count) {
  if (count <= 6) return color("series-" + index);
  const [first, last] = ["ramp-first", "ramp-last"].map((name) => color(name).split(",").map(parseFloat));
  const [hue, saturation, light] = first.map((value, part) => value + (last[part] - value) * index / (count - 1));
  return `hsl(${hue}, ${saturation}%, ${light}%)`;
}

// A line across the chart at each place, with a short label at its top.
function marked(places, paint = color("muted")) {
  return {
    shapes: places.map(({ x }) => ({
      type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: paint, width: 1.5, dash: "dot" },
    })),
    annotations: places.map(({ x, label }) => ({
      x, xanchor: "left", xshift: 2, yref: "paper", y: 1, yanchor: "top", text: label, showarrow: false,
      font: { size: 11, color: color("text") }, bgcolor: color("surface"), borderpad: 2,
    })),
  };
}

// A step is drawn at its number: what began with it began before it.
function changes() {
  return marked(data.marks.map(({ label, step }) => ({ x: step - 0.5, label })));
}

// Of few steps the axis would name fractions, rounded to the same number twice.
function stepAxis(lines, more) {
  const drawn = lines.flatMap((one) => [one.x[0], one.x[one.x.length - 1]]);
  const few = Math.max(...drawn) - Math.min(...drawn) < 8;
  return axis({ title: { text: "step", standoff: 6 }, tickformat: ",d", ...(few ? { dtick: 1 } : {}), ...more });
}

function isoTime(seconds) {
  return new Date(seconds * 1000).toISOString().slice(0, 23);
}

const drawings = {
  stages(lines) {
    return {
      data: lines.map((one, index) => line(one, stageColor(index, lines.length), {
        hovertemplate: "%{y:,.1f} ms",
      })),
      layout: layout(320, {
        xaxis: stepAxis(lines), yaxis: axis({ title: { text: "ms a step", standoff: 8 }, rangemode: "tozero" }),
        showlegend: lines.length <= 16, ...changes(),
      }),
    };
  },

  imbalance({ lines, trigger_percent: trigger }) {
    return {
      data: lines.map((one, index) => line(one, index ? color("imbalance") : color("fill"), {
        line: { color: index ? color("imbalance") : color("fill"), width: index ? 2.5 : 1.25 },
        hovertemplate: "%{y:.1f}%",
      })),
      layout: layout(320, {
        xaxis: stepAxis(lines), yaxis: axis({ ticksuffix: "%", rangemode: "tozero" }),
        annotations: changes().annotations,
        shapes: [{
          type: "line", xref: "paper", x0: 0, x1: 1, y0: trigger, y1: trigger,
          line: { color: color("bad"), width: 1.5, dash: "dash" },
        }, ...changes().shapes],
      }),
    };
  },

  chain({ loss, repeated, resumed }) {
    const drawn = (curve) => ({ name: "loss", x: curve.step, y: curve.loss });
    return {
      data: [
        line(drawn(loss), color("series-0"), { hovertemplate: "%{y:.4f}" }),
        ...repeated.map((curve, index) => line(
          { ...drawn(curve), name: "taken again" }, color("series-1"),
          {
            line: { color: color("series-1"), width: 2.5, dash: "dot" }, legendgroup: "again", showlegend: !index,
            hovertemplate: "%{y:.4f} in attempt " + curve.attempt + "<extra></extra>",
          },
        )),
      ],
      layout: layout(340, {
        xaxis: stepAxis([drawn(loss)]), yaxis: axis({ title: { text: "loss", standoff: 8 } }),
        ...marked(resumed.map(([attempt, step]) => ({ x: step - 0.5, label: "attempt " + attempt }))),
      }),
    };
  },

  loss(lines) {
    const upper = lines.find((one) => one.name === "loss");
    const lower = lines.find((one) => one.name !== "loss");
    const both = upper && lower;
    const drawn = [];
    if (upper) drawn.push(line(upper, color("series-0"), { hovertemplate: "%{y:.4f}" }));
    if (lower) drawn.push(line(lower, color("series-2"), { hovertemplate: "%{y:,.0f}", yaxis: both ? "y2" : "y" }));
    const rate = axis({ title: { text: "tokens/s", standoff: 8 }, rangemode: "tozero" });
    return {
      data: drawn,
      layout: layout(both ? 400 : 300, {
        xaxis: stepAxis(lines, { anchor: both ? "y2" : "y" }),
        yaxis: upper ? axis({ title: { text: "loss", standoff: 8 }, domain: both ? [0.46, 1] : [0, 1] }) : rate,
        ...(both ? { yaxis2: Object.assign(rate, { domain: [0, 0.38] }) } : {}),
        ...changes(),
      }),
    };
  },

  devices({ labels, time_seconds: times, bin_seconds: width, ratios }) {
    const most = Math.max(1, ...ratios.map((row) => Math.max(...row.map((value) => value || 0))));
    const small = labels.length <= 40;
    return {
      data: [{
        type: "heatmap", x: times.map(isoTime), y: labels,
        z: ratios, zmin: 0, zmax: most, xgap: 0, ygap: small ? 2 : 0, hoverongaps: false,
        colorscale: [[0, color("heat-low")], [0.5, color("heat-middle")], [1, color("heat-high")]],
        colorbar: narrow.matches
          ? { orientation: "h", thickness: 8, tickformat: ".0%", outlinewidth: 0, y: 1, yanchor: "bottom", ypad: 8 }
          : { thickness: 10, tickformat: ".0%", outlinewidth: 0, len: 1, y: 0.5 },
        hovertemplate: "%{y}<br>%{x|%H:%M:%S}<br>%{z:.1%}<extra></extra>",
      }],
      layout: layout(Math.max(narrow.matches ? 250 : 200, Math.min(760, labels.length * (small ? 30 : 12) + 90)), {
        hovermode: "closest", showlegend: false,
        xaxis: axis({ type: "date", showgrid: false, title: { text: narrow.matches ? "" : "UTC", standoff: 6 }, tickangle: 0, nticks: narrow.matches ? 4 : 0 }),
        yaxis: axis({ type: "category", autorange: "reversed", showgrid: false, fixedrange: true, ticklen: 4 }),
        margin: { l: 48, r: 12, t: narrow.matches ? 40 : 12, b: 40 },
        ...marked(data.marks.map(({ label, time_seconds: seconds }) => ({ x: isoTime(seconds), label })), color("attention")),
      }),
    };
  },
};

function draw() {
  for (const [key, drawing] of Object.entries(drawings)) {
    const place = document.getElementById("chart-" + key);
    if (!place) continue;
    const figure = drawing(data[key]);
    Plotly.react(place, figure.data, figure.layout, { responsive: true, displayModeBar: false });
  }
}

draw();
dark.addEventListener("change", draw);
narrow.addEventListener("change", draw);
