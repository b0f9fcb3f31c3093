// A panel is a list of parts that the server renders. A part is replaced only when its HTML has changed, so
// that players go on playing; the element in focus keeps the focus.
(() => {
  "use strict";

  const enhancers = [];

  function visible(element) {
    return element.isConnected && element.offsetParent !== null && !document.hidden;
  }

  function replace(part, html) {
    const active = part.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    part.innerHTML = html;
    if (active) part.querySelector(`[data-key="${CSS.escape(active)}"]`)?.focus();
    enhancers.forEach((enhance) => enhance(part));
  }

  function panel(element, { server, emit, every, query, watch }) {
    const shown = new Map();
    const asked = { ...query() };
    let asking = null;
    let dragging = null;

    const root = () => element.querySelector(".va-panel");
    const status = () => root()?.querySelector(":scope > .va-message");

    function draw(parts) {
      const body = root();
      if (!body) return;
      const gone = [...shown.keys()].filter((name) => !(name in parts)).map((name) => [name, ""]);
      for (const [name, html] of [...Object.entries(parts), ...gone]) {
        let part = body.querySelector(`:scope > [data-part="${name}"]`);
        if (!part) {
          part = document.createElement("section");
          part.dataset.part = name;
          body.append(part);
          shown.delete(name);
        }
        if (shown.get(name) !== html) {
          replace(part, html);
          shown.set(name, html);
        }
      }
      body.dataset.ready = "yes";
    }

    function tell(text, bad) {
      const place = status();
      if (!place) return;
      place.textContent = text || "";
      place.classList.toggle("va-bad", Boolean(bad));
    }

    async function refresh() {
      if (asking || dragging) return asking;
      asking = server
        .show({ ...asked })
        .then((parts) => {
          draw(parts);
          if (status()?.dataset.lost) {
            delete status().dataset.lost;
            tell("");
          }
        })
        .catch(() => {
          const place = status();
          if (place) place.dataset.lost = "yes";
          tell("The server does not answer. This page goes on by itself when it is back.", true);
        })
        .finally(() => { asking = null; });
      return asking;
    }

    async function act(request) {
      let answer;
      try {
        answer = await server.act(request);
      } catch {
        answer = { error: "The server did not answer. Try again when it is back." };
      }
      tell(answer.error || answer.message, answer.error);
      await asking;
      await refresh();
    }

    async function open(request) {
      const dialog = root().querySelector(":scope > dialog");
      const { html } = await server.look(request);
      dialog.innerHTML = html;
      enhancers.forEach((enhance) => enhance(dialog));
      if (!dialog.open) dialog.showModal();
    }

    element.addEventListener("click", (event) => {
      const button = event.target.closest("[data-act], [data-page], [data-emit], [data-look], [data-close]");
      if (!button || !element.contains(button)) {
        if (event.target.tagName === "DIALOG") event.target.close();
        return;
      }
      const data = { ...button.dataset };
      if (data.confirm && !window.confirm(data.confirm)) return;
      if ("close" in data || data.act || data.emit) root().querySelector(":scope > dialog")?.close();
      if (data.act) act(data);
      else if (data.page) { asked.page = Number(data.page); refresh(); }
      else if (data.emit) emit(data.emit, data);
      else if (data.look) open(data);
    });

    // A closed dialog must not go on playing. The event does not bubble.
    element.addEventListener("close", (event) => {
      if (event.target.tagName === "DIALOG") event.target.replaceChildren();
    }, true);

    element.addEventListener("change", (event) => {
      const field = event.target.closest("[data-query]");
      if (!field) return;
      asked[field.dataset.query] = field.value;
      asked.page = 1;
      refresh();
    });

    // Pending jobs can be dragged; the arrow buttons do the same from the keyboard. A job dropped on the lower
    // half of another goes behind it, so that every place can be reached, the last one too.
    const place = (row, event) => {
      const box = row.getBoundingClientRect();
      return event.clientY > box.top + box.height / 2 ? "after" : "before";
    };
    const unmark = () => element
      .querySelectorAll(".va-drop-before, .va-drop-after")
      .forEach((each) => each.classList.remove("va-drop-before", "va-drop-after"));
    element.addEventListener("dragstart", (event) => {
      const row = event.target.closest?.("[draggable=true][data-job]");
      if (!row) return;
      dragging = row.dataset.job;
      event.dataTransfer.effectAllowed = "move";
      event.dataTransfer.setData("text/plain", dragging);
    });
    element.addEventListener("dragover", (event) => {
      const row = event.target.closest?.("[draggable=true][data-job]");
      unmark();
      if (!dragging || !row) return;
      event.preventDefault();
      row.classList.add(`va-drop-${place(row, event)}`);
    });
    element.addEventListener("drop", (event) => {
      const row = event.target.closest?.("[draggable=true][data-job]");
      if (!dragging || !row) return;
      event.preventDefault();
      const job = dragging;
      dragging = null;
      unmark();
      if (row.dataset.job !== job) act({ act: "move", where: place(row, event), job, other: row.dataset.job });
    });
    element.addEventListener("dragend", () => {
      dragging = null;
      unmark();
    });

    watch("value", () => { Object.assign(asked, query()); refresh(); });
    refresh();
    const timer = setInterval(() => {
      if (!element.isConnected) clearInterval(timer);
      else if (visible(element)) refresh();
    }, every);
    document.addEventListener("visibilitychange", () => { if (visible(element)) refresh(); });
  }

  window.videoattn = { panel, enhance: (enhancer) => enhancers.push(enhancer) };
})();
