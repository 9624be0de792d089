"""The folder is on the path, for what the processes of the tests import."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
