// A page that is served, not saved: it asks whether the runs' files have changed, and then loads
// itself again as it was: experiments that were switched off stay so, and so does the place.
const remembered = () => { try { return JSON.parse(sessionStorage.getItem("quiver-hidden")) || []; } catch { return []; } };
remembered().forEach((label) => { if (switches.some((s) => s.dataset.label === label)) toggle(label, false); });
const alive = document.querySelector("[data-version]");
const pause = el("button", { type: "button", class: "pause" }, "Pause");
let paused = false;
pause.onclick = () => { paused = !paused; pause.textContent = paused ? "Go on" : "Pause"; };
alive.append(" ", pause);
const ask = async () => {
  try {
    const version = await (await fetch("/version")).text();
    alive.firstChild.textContent = "live";
    if (!paused && version !== alive.dataset.version) {
      sessionStorage.setItem("quiver-hidden", JSON.stringify([...hidden]));
      location.reload();
    }
  } catch { alive.firstChild.textContent = "the server has ended; this is the last that was seen"; }
};
setInterval(ask, 1000 * Number(alive.dataset.every));
