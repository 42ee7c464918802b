// Draws a picture of each simulation from the JSON in the page, anew when light and dark change.
"use strict";

const charts = JSON.parse(document.getElementById("data").textContent);
const narrow = window.matchMedia("(max-width: 600px)");
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const touch = window.matchMedia("(pointer: coarse)");

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

// The kind gives the color; from the first to the last chunk of a stage it turns away from the other kinds.
function barColor(kind, shade) {
  const [hue, saturation, light] = color("kind-" + kind).split(",").map(parseFloat);
  const turn = { F: -26, B: 20, W: -50 }[kind];
  return `hsl(${hue + turn * shade}, ${saturation}%, ${light + (dark.matches ? -16 : 16) * shade}%)`;
}

function bars({ bars: groups }) {
  return groups.map((group) => ({
    type: "bar", orientation: "h", name: group.name, y: group.stage, base: group.start, x: group.length, width: 0.86,
    customdata: group.microbatch.map((microbatch, index) => [microbatch, group.start[index], group.length[index]]),
    marker: { color: barColor(group.kind, group.shade), line: { color: color("surface"), width: 0.5 } },
    hovertemplate: "stage %{y}, microbatch %{customdata[0]}<br>"
      + "%{customdata[2]:.4g} ms, from %{customdata[1]:,.4~f} ms on<extra>" + group.name + "</extra>",
  }));
}

function spans({ spans: rows, longest }) {
  const width = longest / rows[0].length;
  return [{
    type: "heatmap", x: rows[0].map((_, index) => width * (index + 0.5)), y: rows.map((_, stage) => stage), z: rows,
    zmin: 0, zmax: 1, xgap: 0, ygap: rows.length <= 40 ? 2 : 0,
    colorscale: [[0, color("idle")], [1, `hsl(${color("kind-F")})`]],
    colorbar: narrow.matches
      ? { orientation: "h", thickness: 8, tickformat: ".0%", outlinewidth: 0, y: 1, yanchor: "bottom", ypad: 8 }
      : { thickness: 10, tickformat: ".0%", outlinewidth: 0, len: 1, y: 0.5 },
    hovertemplate: "stage %{y}, at %{x:,.4~f} ms<br>busy %{z:.0%}<extra></extra>",
  }];
}

function axis(more) {
  return Object.assign({
    gridcolor: color("line"), linecolor: color("line"), zeroline: false, automargin: true, fixedrange: touch.matches,
    title: { font: { size: 12, color: color("muted") }, standoff: 8 },
  }, more);
}

function layout({ stages, longest }) {
  return {
    height: Math.max(220, Math.min(820, stages * 30 + 120)),
    margin: { l: 48, r: 12, t: 28, b: 40 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    barmode: "overlay",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("muted") },
    hoverlabel: { bgcolor: color("surface"), bordercolor: color("line"), font: { color: color("text") } },
    hovermode: "closest",
    // A finger that drags scrolls the page.
    dragmode: touch.matches ? false : "zoom",
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: color("text") } },
    showlegend: true,
    xaxis: axis({ title: { text: "ms", standoff: 6 }, range: [0, longest], showgrid: true }),
    yaxis: axis({
      title: { text: "stage", standoff: 8 }, range: [stages - 0.5, -0.5], showgrid: false, fixedrange: true,
      tickformat: "d", ...(stages <= 16 ? { dtick: 1 } : {}),
    }),
  };
}

function draw() {
  charts.forEach((chart, index) => {
    const data = chart.bars ? bars(chart) : spans(chart);
    Plotly.react("chart-" + index, data, layout(chart), { responsive: true, displayModeBar: false });
  });
}

draw();
dark.addEventListener("change", draw);
narrow.addEventListener("change", draw);
