"""One line at the top of a training script: ``import msprobe_megatron.adaptor``.

Looks at the command line only. Without `--msprobe-config` (or $MSPROBE_CONFIG) nothing else of the kit is imported
and nothing is patched; `--help` is the exception, so that Megatron's help lists the flags.
"""

import sys

from msprobe_megatron.switch import asked

if asked(sys.argv[1:]):
    from msprobe_megatron.arming import arm

    arm()
