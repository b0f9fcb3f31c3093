import gc
import signal
import sys
from pathlib import Path

# A shell starts background jobs with SIGINT ignored, and their children inherit it; tests interrupt theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The files that take longest, so that none of them is left to one worker at the end.
LONGEST = [
    "batch/test_batch_run.py",
    "web/test_page.py",
    "processors/test_compile.py",
    "batch/test_on_ray.py",
    "kernels/test_hopper_simulated.py",
    "kernels/test_hopper_variants.py",
    "web/test_api.py",
    "ladder/test_simulated.py",
    "demo/test_training.py",
    "blackwell/test_simulated.py",
    "render/test_ranks.py",
    "cli/test_command.py",
    "demo/test_checker.py",
    "processors/test_fused.py",
    "cli/test_bad_input.py",
    "web/test_security.py",
    "render/test_run.py",
    "batch/test_batch_again.py",
    "ladder/test_compile.py",
    "kernels/test_verify.py",
    "web/test_command.py",
    "cli/test_demo_command.py",
    "blackwell/test_mutants.py",
    "render/test_recipes.py",
    "ladder/test_mutants.py",
]


def pytest_collection_modifyitems(items):
    place = {Path(__file__).parent / name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


def pytest_collection_finish():
    # Small tensors: a second thread costs more than it saves, and the workers share the cores already.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    # What the imports have made stays for good: the collector need not go through it again and again.
    gc.collect()
    gc.freeze()
