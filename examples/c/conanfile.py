# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The example as a consumer of the Conan package; `conan create` at the root tries it."""

from __future__ import annotations

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout


class Example(ConanFile):
    """What it needs is what is being tested."""

    settings = "os", "arch", "compiler", "build_type"
    generators = "CMakeDeps"

    def requirements(self) -> None:
        """The package itself."""
        self.requires(self.tested_reference_str)

    def layout(self) -> None:
        """Folders as CMake's users have them."""
        cmake_layout(self)

    def generate(self) -> None:
        """Leave no presets beside the sources."""
        toolchain = CMakeToolchain(self)
        toolchain.user_presets_path = False
        toolchain.generate()

    def build(self) -> None:
        """Headers alone have no library to call."""
        if self.dependencies["flashbsr"].options.library:
            cmake = CMake(self)
            cmake.configure()
            cmake.build()

    def test(self) -> None:
        """The example compares itself with float64."""
        if self.dependencies["flashbsr"].options.library:
            CMake(self).ctest(["--output-on-failure", "--no-tests=error"])
