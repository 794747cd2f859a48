# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A Conan 2 package of the C++ headers and of libflashbsr, the C library.

conan create . --build=missing                         tries it with examples/c
conan create . --build=missing -o '&:library=False'    headers alone, for every architecture
"""

from __future__ import annotations

import re
from pathlib import Path

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import copy


class Flashbsr(ConanFile):
    """Consumers find the CMake files of its own: flashbsr::c, ::c_static and ::headers."""

    name = "flashbsr"
    description = "Attention engine for LLM inference over block-sparse-row KV layouts"
    license = "Apache-2.0"
    homepage = "https://github.com/flashbsr/flashbsr"
    topics = ("attention", "llm", "inference", "cuda")
    package_type = "shared-library"  # with the static one beside it
    required_conan_version = ">=2.4"
    test_package_folder = "examples/c"

    settings = "os", "arch", "compiler", "build_type"
    # cuda: kernels; toolkit says by what, as FLASHBSR_CUDA_TOOLKIT does (docs/building.md).
    options = {"library": [True, False], "cuda": [True, False], "toolkit": ["ANY"]}  # noqa: RUF012
    default_options = {"library": True, "cuda": False, "toolkit": ""}  # noqa: RUF012
    exports_sources = "CMakeLists.txt", "LICENSE", "cmake/*", "cpp/*", "include/*"

    def set_version(self) -> None:
        """Read it where it is written, once."""
        text = Path(self.recipe_folder, "include/flashbsr/config.h").read_text()
        self.version = re.search(r'#define FLASHBSR_VERSION "([^"]+)"', text)[1]

    def configure(self) -> None:
        """Headers are the same with and without kernels."""
        if not self.options.library:
            self.options.rm_safe("cuda")
            self.options.rm_safe("toolkit")
            self.package_type = "header-library"

    def layout(self) -> None:
        """Folders as CMake's users have them."""
        cmake_layout(self)

    def package_id(self) -> None:
        """One package of headers serves every machine."""
        if not self.info.options.library:
            self.info.clear()

    def generate(self) -> None:
        """Choose what the CMake project builds."""
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["FLASHBSR_C"] = bool(self.options.library)
        toolchain.cache_variables["FLASHBSR_PYTHON"] = False
        cuda = self.options.get_safe("cuda")
        toolchain.cache_variables["FLASHBSR_CUDA"] = "ON" if cuda else "OFF"
        toolchain.cache_variables["FLASHBSR_CUDA_TOOLKIT"] = str(
            self.options.get_safe("toolkit") or ""
        )
        toolchain.generate()

    def build(self) -> None:
        """Compile."""
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self) -> None:
        """Install as under any other prefix."""
        copy(self, "LICENSE", self.source_folder, str(Path(self.package_folder, "licenses")))
        CMake(self).install()

    def package_info(self) -> None:
        """Lead to the installed CMake files; other generators link the shared library."""
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["lib/cmake/flashbsr"]
        self.cpp_info.set_property("pkg_config_name", "flashbsr")
        self.cpp_info.libs = ["flashbsr"] if self.options.library else []
