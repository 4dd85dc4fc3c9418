"""Wheels carry compiled kernels, one file for each instruction set that is worth it. All else is in pyproject.toml."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

# The file alone: the package imports torch.
_spec = importlib.util.spec_from_file_location("build", Path(__file__).parent / "src/longdraft/native/build.py")
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)


class BuildPackage(build_py):
    """Compiles the kernels into the built package; an editable one compiles them when they are first needed."""

    carried = False

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib, "longdraft/native", build.PREBUILT_DIR)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            levels = build.platform_levels()
        except OSError as error:
            levels = []
            print(error)
        for level in levels:
            print(f"compiling kernels for {level}")
            try:
                build.compile_kernels(level, folder)
                self.carried = True
            except build.CompilerError as error:  # an old compiler knows fewer instruction sets
                print(f"no kernels for {level}: {error}")
        if not self.carried:
            shutil.rmtree(folder, ignore_errors=True)
            print("no kernels in this wheel, they are compiled where they first run")


class Wheel(bdist_wheel):
    """For one platform if it carries kernels, but for every Python: nothing of them is linked with it."""

    def run(self) -> None:
        self.run_command("build_py")
        if self.get_finalized_command("build_py").carried:
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True  # files go to the platform's folder
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(cmdclass={"build_py": BuildPackage, "bdist_wheel": Wheel})
