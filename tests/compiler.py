"""The C++ compiler that would build the kernels, if there is one."""

import os
import shlex
import shutil

NAMES = [shlex.split(os.environ["CXX"])[0]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
COMPILER = next(filter(None, map(shutil.which, NAMES)), None)
