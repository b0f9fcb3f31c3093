// Two players in lock-step: A is the clock, B follows, and a canvas shows the difference of what they show.
videoattn.enhance((part) => {
  "use strict";
  part.querySelectorAll(".va-stage").forEach((stage) => {
    const [a, b] = stage.querySelectorAll("video");
    const [count, rate] = [Number(stage.dataset.frames), fraction(stage.dataset.rate)];
    const control = (name) => stage.querySelector(`[data-do="${name}"]`);
    const figure = stage.querySelector(".va-difference");
    const canvas = figure.querySelector("canvas");
    const frameNow = () => Math.min(count - 1, Math.max(0, Math.floor(a.currentTime * rate + 0.01)));

    function fraction(text) {
      const [over, under] = text.split("/").map(Number);
      return under ? over / under : over;
    }

    // The middle of a frame, so that rounding never shows its neighbour.
    function seek(frame) {
      const time = (Math.min(count - 1, Math.max(0, frame)) + 0.5) / rate;
      a.currentTime = time;
      b.currentTime = time;
    }

    function pause() {
      a.pause();
      b.pause();
      seek(frameNow());
      control("play").textContent = "Play";
    }

    async function play() {
      b.currentTime = a.currentTime;
      await Promise.allSettled([a.play(), b.play()]);
      control("play").textContent = "Pause";
    }

    function draw() {
      if (figure.hidden || a.readyState < 2 || b.readyState < 2) return;
      const context = canvas.getContext("2d");
      context.globalCompositeOperation = "copy";
      context.drawImage(a, 0, 0, canvas.width, canvas.height);
      context.globalCompositeOperation = "difference";
      context.drawImage(b, 0, 0, canvas.width, canvas.height);
    }

    function tick() {
      if (!stage.isConnected) return;
      if (!a.paused && Math.abs(a.currentTime - b.currentTime) > 0.6 / rate) b.currentTime = a.currentTime;
      control("scrub").value = frameNow();
      stage.querySelector("[data-frame]").textContent = frameNow();
      draw();
      requestAnimationFrame(tick);
    }

    control("play").addEventListener("click", () => (a.paused ? play() : pause()));
    control("back").addEventListener("click", () => { pause(); seek(frameNow() - 1); });
    control("on").addEventListener("click", () => { pause(); seek(frameNow() + 1); });
    control("scrub").addEventListener("input", (event) => {
      const frame = Number(event.target.value);
      a.pause();
      b.pause();
      control("play").textContent = "Play";
      seek(frame);
    });
    control("difference").addEventListener("change", (event) => {
      figure.hidden = !event.target.checked;
      stage.querySelector(".va-gain").hidden = !event.target.checked;
    });
    control("gain").addEventListener("input", (event) => {
      canvas.style.filter = `brightness(${event.target.value})`;
      stage.querySelector("[data-gain]").textContent = event.target.value;
    });
    canvas.style.filter = "brightness(8)";
    a.addEventListener("ended", () => seek(0));
    requestAnimationFrame(tick);
  });
});
