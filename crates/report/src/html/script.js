// A reading line over the distributions: the share of requests of each report that took at most this long.
for (const chart of document.querySelectorAll("svg.cdf")) {
  const [left, top, right, bottom] = chart.dataset.frame.split(" ").map(Number);
  const from = Number(chart.dataset.from), to = Number(chart.dataset.to);
  const reader = chart.querySelector(".reader"), reading = chart.parentElement.querySelector(".reading");
  const lines = [...chart.querySelectorAll("polyline")].map((line) => ({
    label: line.dataset.label,
    points: line.getAttribute("points").trim().split(" ").map((point) => point.split(",").map(Number)),
  }));
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const x = Math.min(right, Math.max(left, ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width));
    const seconds = 10 ** (from + ((x - left) / (right - left)) * (to - from));
    reader.setAttribute("d", `M${x.toFixed(1)} ${top}V${bottom}`);
    const shares = lines.map(({ label, points }) => {
      const last = points.filter((point) => point[0] <= x).pop();
      const share = last ? (bottom - last[1]) / (bottom - top) : 0;
      return `${label} ${(share * 100).toFixed(1)}%`;
    });
    reading.textContent = `within ${seconds.toPrecision(3)} s: ${shares.join("   ")}`;
  });
  chart.addEventListener("pointerleave", () => {
    reader.setAttribute("d", "");
    reading.textContent = "";
  });
}
