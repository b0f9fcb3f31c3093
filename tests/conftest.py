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
    "batch/test_on_ray.py",
    "processors/test_compile.py",
    "cli/test_bad_input.py",
    "demo/test_checker.py",
    "cli/test_command.py",
    "blackwell/test_mutants.py",
    "render/test_run.py",
    "demo/test_training.py",
    "kernels/test_hopper_variants.py",
    "ladder/test_simulated.py",
    "blackwell/test_simulated.py",
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
