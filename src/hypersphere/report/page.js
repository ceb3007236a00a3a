"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("plots").textContent);
  const plots = Object.keys(figures).map((id) => document.getElementById(id));
  const withClass = (name) => plots.filter((plot) => plot.classList.contains(name));

  // The colours live in the style sheet alone; a template hands them to Plotly.
  const template = () => {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    const axis = {
      gridcolor: color("line"),
      linecolor: color("line"),
      zerolinecolor: color("line"),
      ticks: "outside", // transparent: they keep the labels of the two axes apart
      tickcolor: "rgba(0,0,0,0)",
    };
    return {
      data: {
        surface: [{ colorscale: [[0, color("globe")], [1, color("globe")]] }],
        scatter3d: [{ line: { color: color("globe-line") } }],
        heatmap: [{ colorscale: [[0, color("card")], [1, color("accent")]] }],
      },
      layout: {
        paper_bgcolor: color("card"),
        plot_bgcolor: color("card"),
        font: { color: color("ink"), family: getComputedStyle(document.body).fontFamily },
        hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("ink") } },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: color("soft"), activecolor: color("accent") },
        // A finger that moves over a flat plot scrolls the page; a mouse zooms.
        dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
        xaxis: axis,
        yaxis: axis,
      },
    };
  };

  const config = (figure) => ({
    responsive: true,
    scrollZoom: false, // the wheel scrolls the page
    displaylogo: false,
    showSendToCloud: false, // nothing leaves the page
    displayModeBar: Boolean(figure.layout.scene),
    modeBarButtons: [["orbitRotation", "zoom3d", "resetCameraDefault3d", "toImage"]],
  });
  const colors = template();
  const drawn = plots.map((plot) => {
    const figure = figures[plot.id];
    return Plotly.newPlot(plot, figure.data, { ...figure.layout, template: colors }, config(figure));
  });

  // Spheres turn together and hide classes together, so that the same things are compared.
  const spheres = withClass("sphere");
  const kind = (plot) => plot.data.map((trace) => trace.name + trace.type).join();
  let following = false;
  const others = async (source, change) => {
    if (following) return;
    following = true;
    await Promise.all(spheres.filter((plot) => plot !== source).map(change));
    following = false;
  };
  for (const sphere of spheres) {
    const turn = (event) => {
      const camera = event["scene.camera"];
      if (camera) others(sphere, (plot) => plot.layout.scene && Plotly.relayout(plot, { "scene.camera": camera }));
    };
    sphere.on("plotly_relayouting", turn);
    sphere.on("plotly_relayout", turn);
    sphere.on("plotly_restyle", ([update, traces]) =>
      others(sphere, (plot) => kind(plot) === kind(sphere) && Plotly.restyle(plot, update, traces)),
    );
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    const changed = template();
    for (const plot of plots) Plotly.relayout(plot, { template: changed });
  });

  document.getElementById("log")?.addEventListener("change", (event) => {
    const type = event.target.checked ? "log" : "linear";
    for (const plot of withClass("log")) Plotly.relayout(plot, { "yaxis.type": type, "yaxis.autorange": true });
  });

  for (const button of document.querySelectorAll("button[data-run]")) {
    button.addEventListener("click", () => {
      const visible = button.getAttribute("aria-pressed") === "false";
      button.setAttribute("aria-pressed", String(visible));
      for (const plot of withClass("curve")) Plotly.restyle(plot, { visible }, [Number(button.dataset.run)]);
    });
  }

  Promise.all(drawn).then(() => document.documentElement.setAttribute("data-ready", ""));
})();
