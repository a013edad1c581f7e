"""What ddp_at_module_level.py executes in its own globals: karpathy/nanoGPT, configurator.py."""

import sys
from ast import literal_eval

for argument in sys.argv[1:]:
    key, value = argument.removeprefix("--").split("=")
    assert key in globals(), f"unknown key: {key}"
    print(f"Overriding: {key} = {value}")
    globals()[key] = literal_eval(value)
