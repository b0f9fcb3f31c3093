"""What pyproject.toml can't say: the kernels' sources go into the package, and a compiled library if given.

scripts/build_wheel.py sets VIDEOATTN_WHEEL_LIBRARY (a path) and VIDEOATTN_WHEEL_PLATFORM (its platform tag).
"""

import os
import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

LIBRARY = os.environ.get("VIDEOATTN_WHEEL_LIBRARY")


class BuildPy(build_py):
    """Adds csrc, which pip can't find under videoattn/, and the library."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib, "videoattn")
        for folder in (package / "csrc", package / "kernels" / "prebuilt"):
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier build in this place
        shutil.copytree("csrc", package / "csrc")
        if LIBRARY:
            target = package / "kernels" / "prebuilt" / "libvideoattn.so"
            target.parent.mkdir()
            shutil.copyfile(LIBRARY, target)


class WithLibrary(Distribution):
    """With a library the package belongs to one platform."""

    def has_ext_modules(self):
        return bool(LIBRARY)


class BdistWheel(bdist_wheel):
    """The library is for one platform, and for every Python."""

    def get_tag(self):
        return ("py3", "none", os.environ["VIDEOATTN_WHEEL_PLATFORM"]) if LIBRARY else super().get_tag()


setup(distclass=WithLibrary, cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})
