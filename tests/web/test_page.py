"""The page in a browser, in front of a real server and the demo model."""

import re

import pytest
from PIL import Image
from playwright.sync_api import expect

from tests.web.conftest import PROMPT, Server

pytestmark = pytest.mark.slow

LONG = 240_000

# A browser so busy that it reads event streams seconds after the server has written them.
LATE_STREAMS = """
const fetched = window.fetch.bind(window);
window.fetch = async (...request) => {
  const answer = await fetched(...request);
  if (!answer.headers.get("content-type")?.startsWith("text/event-stream")) return answer;
  const late = new TransformStream({
    async transform(part, out) {
      await new Promise((done) => setTimeout(done, 2000));
      out.enqueue(part);
    },
  });
  return new Response(answer.body.pipeThrough(late), answer);
};
"""


def tab(page, name):
    page.get_by_role("tab", name=name, exact=True).click()


def fill(page, *, prompt=PROMPT, steps=2, seed=None):
    page.locator("#prompt textarea").fill(prompt)
    page.locator("#steps input[type=number]").fill(str(steps))
    page.locator("#steps input[type=number]").press("Tab")
    if seed is not None:
        page.locator("#seed input, #seed textarea").fill(str(seed))


def generate(page, **values):
    fill(page, **values)
    page.locator("#submit").click()
    expect(page.locator("#told")).to_contain_text("queued")


def test_a_prompt_becomes_a_clip_that_plays(server, browse):
    page = browse(server.url)
    generate(page, seed=7)
    video = page.locator("#va-latest video")
    video.wait_for(timeout=LONG)
    page.wait_for_function(
        "() => { const v = document.querySelector('#va-latest video'); "
        "return v.readyState >= 2 && v.videoWidth === 128 && v.currentTime > 0.2 && !v.error }"
    )
    expect(page.locator("#va-latest")).to_contain_text("seed 7")


def test_a_browser_that_is_slow_to_read_gets_an_answer_to_each_click(server, browse):
    page = browse(server.url, script=LATE_STREAMS)
    page.locator("#prompt textarea").fill(PROMPT)
    told = page.locator("#told")
    jobs = []
    for _ in range(3):
        page.locator("#submit").click()
        expect(told).to_contain_text(re.compile(f"Job {jobs[-1] + 1 if jobs else '[0-9]+'} is queued"))
        jobs.append(int(re.search("Job ([0-9]+)", told.inner_text())[1]))
    for job in reversed(jobs):
        server.call("cancel", job)
        server.wait(job, "cancelled")


def test_an_empty_prompt_is_refused_in_words(server, browse):
    page = browse(server.url)
    page.locator("#submit").click()
    expect(page.get_by_text("say what the clip shows").first).to_be_visible()
    # Said again to whoever clicks again.
    page.evaluate("document.querySelector('[data-testid=toast-close]')?.click()")
    expect(page.get_by_text("say what the clip shows")).to_have_count(0)
    page.locator("#submit").click()
    expect(page.get_by_text("say what the clip shows").first).to_be_visible()


def test_the_estimate_and_illegal_sizes_are_told_before_submitting(server, browse):
    page = browse(server.url)
    estimate = re.compile(r"About .*of main memory \(predicted\).*of disk at most", re.DOTALL)
    expect(page.locator("#estimate")).to_contain_text(estimate, timeout=LONG)
    page.locator("#advanced").get_by_role("button").first.click()
    page.locator("#own-width input").fill("130")
    page.locator("#own-width input").press("Tab")
    expect(page.locator("#estimate")).to_contain_text("width 130: use 128 or 160")


def test_gallery_settings_go_back_into_the_form(server, browse):
    (job,) = server.submit(seed=99, num_inference_steps=3, guidance_scale=2.5)
    server.wait(job, "done")
    page = browse(server.url)
    tab(page, "Gallery")
    page.locator(f"#va-gallery [data-job='{job}'] [data-emit=reuse]").click()
    expect(page.locator("#seed input, #seed textarea")).to_have_value("99")
    expect(page.locator("#prompt textarea")).to_have_value(PROMPT)
    expect(page.locator("#steps input[type=number]")).to_have_value("3")
    expect(page.locator("#guidance input[type=number]")).to_have_value("2.5")
    expect(page.locator("#fresh-seed input")).not_to_be_checked()


def test_gallery_plays_shows_the_receipt_and_deletes(server, browse):
    (job,) = server.submit(seed=5)
    server.wait(job, "done")
    page = browse(server.url)
    tab(page, "Gallery")
    page.locator(f"#va-gallery [data-look='{job}']").click()
    dialog = page.locator("#va-gallery dialog")
    expect(dialog).to_contain_text("sdpa served video_self, video_text")
    page.wait_for_function("() => document.querySelector('#va-gallery dialog video').currentTime > 0")
    page.keyboard.press("Escape")
    expect(dialog).not_to_be_visible()
    page.once("dialog", lambda asked: asked.accept())
    page.locator(f"#va-gallery [data-job='{job}'] [data-act=delete]").click()
    expect(page.locator(f"#va-gallery li[data-job='{job}']")).to_have_count(0)
    assert server.http.get(f"media/{job}/clip").status_code == 404


def test_a_dropped_clip_fills_the_form(server, browse, tmp_path):
    (job,) = server.submit(seed=2**60 + 1, num_inference_steps=3)
    server.wait(job, "done")
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(server.http.get(f"media/{job}/clip").content)
    page = browse(server.url)
    page.locator("#drop-clip input[type=file]").set_input_files(str(clip))
    # Seeds above 2^53 survive, which a number field would not let them.
    expect(page.locator("#seed input, #seed textarea")).to_have_value(str(2**60 + 1))
    expect(page.locator("#prompt textarea")).to_have_value(PROMPT)


def test_a_dropped_clip_whose_start_image_is_gone_says_so(server, browse, tmp_path):
    page = browse(server.url)
    image = tmp_path / "start.png"
    Image.new("RGB", (128, 128), "blue").save(image)
    page.locator("#start-image input[type=file]").set_input_files(str(image))
    expect(page.locator("#start-image img").first).to_be_visible()
    generate(page, seed=11)
    job = int(re.search("Job ([0-9]+)", page.locator("#told").inner_text())[1])
    server.wait(job, "done")
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(server.http.get(f"media/{job}/clip").content)
    for kept in (server.output / ".videoattn" / "images").iterdir():
        kept.unlink()
    page.locator("#drop-clip input[type=file]").set_input_files(str(clip))
    expect(page.locator("#told")).to_contain_text("began with an image that is not here")
    expect(page.locator("#seed input, #seed textarea")).to_have_value("11")


def test_a_dropped_file_without_settings_is_refused_in_words(server, browse, tmp_path):
    wrong = tmp_path / "clip.mp4"
    wrong.write_bytes(b"no clip at all")
    page = browse(server.url)
    page.locator("#drop-clip input[type=file]").set_input_files(str(wrong))
    expect(page.get_by_text("carries no settings").first).to_be_visible()


def test_a_queue_of_three_survives_cancels_and_a_restart(browse, tmp_path):
    server = Server(tmp_path / "clips")
    try:
        page = browse(server.url)
        generate(page, steps=100, seed=1)
        for seed in (2, 3):
            generate(page, steps=2, seed=seed)
            expect(page.locator("#told")).to_contain_text(f"Job {seed} is queued")
        tab(page, "Queue")
        running = page.locator("#va-queue .va-running")
        expect(running).to_contain_text(re.compile("Denoising, [1-9]"), timeout=LONG)
        page.locator("#va-queue [data-job='2'][data-act=cancel]").click()
        expect(page.locator("#va-queue [data-part=ended]")).to_contain_text("Job 2")

        server.stop()
        port = server.port
        expect(page.locator("#va-queue .va-message")).to_contain_text("does not answer")
        server = Server(tmp_path / "clips", port=port)
        # The render in hand was queued again, in its old place.
        expect(running).to_contain_text("Job 1", timeout=LONG)
        expect(running).to_contain_text(re.compile("Denoising, [1-9]"), timeout=LONG)
        running.get_by_text("Stop").click()
        expect(page.locator("#va-queue [data-part=ended]")).to_contain_text("Job 1", timeout=LONG)
        states = {job: server.wait(job, "done", "cancelled")["state"] for job in (1, 2, 3)}
        assert states == {1: "cancelled", 2: "cancelled", 3: "done"}
    finally:
        server.stop()


def test_a_killed_server_leaves_an_interrupted_job_that_can_be_retried(browse, tmp_path):
    server = Server(tmp_path / "clips")
    (first,) = server.submit(num_inference_steps=100)
    (second,) = server.submit(seed=2)
    server.wait(first, "running")
    server.kill()
    server = Server(tmp_path / "clips")
    try:
        assert server.status(first)["state"] == "interrupted"
        server.wait(second, "done")
        page = browse(server.url)
        tab(page, "Queue")
        row = page.locator(f"#va-queue [data-part=ended] li[data-job='{first}']")
        expect(row).to_contain_text("interrupted")
        row.get_by_text("Retry").click()
        server.wait(first, "running")
        server.call("cancel", first)
        server.wait(first, "cancelled")
    finally:
        server.stop()


def test_the_queue_is_reordered_by_keyboard_and_by_dragging(server, browse):
    (busy,) = server.submit(num_inference_steps=200)
    server.wait(busy, "running")
    jobs = [server.submit(seed=seed)[0] for seed in (21, 22, 23)]
    page = browse(server.url)
    tab(page, "Queue")
    page.locator(f"#va-queue [data-key='first-{jobs[2]}']").focus()
    page.keyboard.press("Enter")
    first = page.locator("#va-queue [data-part=pending] li").first
    expect(first).to_have_attribute("data-job", str(jobs[2]))
    # The focus stays on the button although the list was drawn anew.
    assert page.evaluate("document.activeElement.dataset.key") == f"first-{jobs[2]}"
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(first).to_have_attribute("data-job", str(jobs[0]))
    row = page.locator("#va-queue [data-part=pending] li")
    row.nth(2).drag_to(first, target_position={"x": 20, "y": 3})
    expect(first).to_have_attribute("data-job", str(jobs[1]))
    height = row.nth(2).bounding_box()["height"]
    first.drag_to(row.nth(2), target_position={"x": 20, "y": height - 3})
    expect(row.nth(2)).to_have_attribute("data-job", str(jobs[1]))
    assert [each["job"] for each in server.call("queue", 50, 0)[0]] == [busy, jobs[0], jobs[2], jobs[1]]
    page.once("dialog", lambda asked: asked.accept())
    page.get_by_text("Cancel all waiting").click()
    expect(page.locator("#va-queue .va-message")).to_contain_text("3 jobs cancelled")
    server.call("cancel", busy)
    server.wait(busy, "cancelled")


@pytest.mark.parametrize("second", ["reference", "auto"])
def test_two_kernels_with_one_seed_side_by_side(server, browse, second):
    page = browse(server.url)
    tab(page, "Compare")
    page.locator("#compare-prompt textarea").fill(PROMPT)
    page.locator("#compare-seed input, #compare-seed textarea").fill("4")
    page.locator("#kernel-b input").fill(second)
    page.locator("#kernel-b input").press("Enter")
    page.locator("#start-comparison").click()
    stage = page.locator("#va-compare .va-stage")
    stage.wait_for(timeout=LONG)
    expect(stage.locator("figcaption").first).to_contain_text("A: sdpa")
    likeness = page.locator("#va-compare .va-likeness")
    if second == "auto":
        expect(page.locator("#va-compare")).to_contain_text("served by the same kernel, sdpa")
        expect(likeness).to_contain_text("Identical", timeout=LONG)
    else:
        expect(stage.locator("figcaption").nth(1)).to_contain_text(f"B: {second}")
        expect(page.locator("#va-compare")).not_to_contain_text("served by the same kernel")
        expect(likeness).to_contain_text(re.compile("Identical|dB"), timeout=LONG)
        expect(page.locator("#va-compare")).to_contain_text(f"{second} served video_self, video_text")
    expect(page.locator("#va-compare .va-charts")).to_contain_text("video_self A")
    expect(page.locator("#va-compare .va-charts")).to_contain_text("denoise B")

    stage.locator("[data-do=scrub]").evaluate("e => { e.value = 20; e.dispatchEvent(new Event('input')) }")
    expect(stage.locator("[data-frame]")).to_have_text("20")
    stage.locator("[data-do=on]").click()
    expect(stage.locator("[data-frame]")).to_have_text("21")
    stage.locator("[data-do=play]").click()
    page.wait_for_timeout(700)
    apart = page.evaluate(
        "() => { const [a, b] = document.querySelectorAll('.va-stage video'); "
        "return [a.paused, b.paused, Math.abs(a.currentTime - b.currentTime)] }"
    )
    assert apart[:2] == [False, False]
    assert apart[2] < 0.1
    stage.locator("[data-do=play]").click()
    stage.locator("[data-do=difference]").check()
    page.wait_for_timeout(500)
    brightest = page.evaluate(
        "() => { const c = document.querySelector('.va-difference canvas'); "
        "return Math.max(...c.getContext('2d').getImageData(0, 0, c.width, c.height).data"
        ".filter((_, i) => i % 4 < 3)) }"
    )
    # The picture shows eight times the difference. Rounding parts the two kernels by some levels of 255;
    # frames out of step would saturate it.
    assert brightest <= (0 if second == "auto" else 8 * 8), brightest


def test_a_kernel_that_cannot_run_here_says_why(server, browse):
    page = browse(server.url)
    tab(page, "Compare")
    page.locator("#compare-prompt textarea").fill(PROMPT)
    page.locator("#kernel-b input").fill("hopper")
    page.locator("#kernel-b input").press("Enter")
    page.locator("#start-comparison").click()
    expect(page.get_by_test_id("toast-body")).to_contain_text("it needs an NVIDIA GPU")
    assert server.call("queue", 50, 0)[0] == []


def test_different_clips_are_measured_and_their_difference_shown(server, browse):
    jobs = server.submit(seed=31, clips=2)
    for job in jobs:
        server.wait(job, "done")
    page = browse(server.url)
    tab(page, "Gallery")
    for job, side in zip(jobs, ("left", "right"), strict=True):
        tab(page, "Gallery")
        page.locator(f"#va-gallery [data-look='{job}']").click()
        page.locator(f"#va-gallery dialog [data-emit={side}]").click()
        page.locator("#va-compare .va-panel").wait_for()
    expect(page.locator("#va-compare .va-likeness")).to_contain_text("dB", timeout=LONG)
    expect(page.locator("#va-compare")).to_contain_text("differ in prompt, seed or model")


def test_timing_by_kind_stage_and_layer(server, browse):
    (job,) = server.submit(seed=3, timing=True)
    server.wait(job, "done")
    page = browse(server.url)
    tab(page, "Timing")
    panel = page.locator("#va-timing")
    expect(panel.locator("table.va-table")).to_contain_text("video_self", timeout=LONG)
    expect(panel).to_contain_text("denoise: video_text")
    expect(panel.get_by_text("video_self by layer")).to_be_visible()
    with page.expect_download() as download:
        panel.get_by_text("Download the log").click()
    assert download.value.suggested_filename.endswith(".timing.jsonl")
    expect(panel).to_contain_text("Arms that cannot run here")
    panel.locator("[data-arms=sdpa]").click()
    expect(panel.locator(".va-message")).to_contain_text("is queued")
    again = job + 1
    server.wait(again, "done")
    panel.locator("select").select_option(str(again))
    expect(panel.locator("table.va-table")).to_contain_text("sdpa / kernel")


def test_status_names_device_kernels_and_disk(server, browse):
    page = browse(server.url)
    tab(page, "Status")
    panel = page.locator("#va-status")
    expect(panel).to_contain_text("CPU", timeout=LONG)
    expect(panel).to_contain_text("it needs an NVIDIA GPU")
    expect(panel).to_contain_text("free of")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone(server, browse, scheme):
    server.wait(server.submit(seed=8, timing=True)[0], "done")
    page = browse(server.url, viewport={"width": 390, "height": 844}, color_scheme=scheme)
    for name in ("Generate", "Queue", "Gallery", "Compare", "Timing", "Status"):
        button = page.get_by_role("tab", name=name, exact=True)
        if not button.is_visible():
            page.locator(".overflow-menu button").first.click()
            page.locator(".overflow-dropdown").get_by_text(name, exact=True).click()
        else:
            button.click()
        page.wait_for_timeout(800)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name


def test_two_tabs_see_the_same_queue(server, browse):
    one, two = browse(server.url), browse(server.url)
    for page in (one, two):
        tab(page, "Queue")
    (job,) = server.submit(num_inference_steps=200)
    for page in (one, two):
        expect(page.locator("#va-queue .va-running")).to_contain_text(f"Job {job}", timeout=LONG)
    one.locator(f"#va-queue .va-running [data-job='{job}'][data-act=cancel]").click()
    expect(two.locator("#va-queue .va-running")).to_have_count(0, timeout=LONG)
    expect(two.locator("#va-queue [data-part=ended]")).to_contain_text(f"Job {job}")
