"""One line at the top of a training script: ``import msprobe_megatron.adaptor``.

Reads the command line only. Without `--msprobe-config` (or $MSPROBE_CONFIG) nothing else of the kit is imported
and nothing is patched; `--help` is an exception, so that Megatron's help lists the flags.
"""

import sys

from msprobe_megatron.run import requested

if requested(sys.argv[1:]):
    from msprobe_megatron.job.session.arming import arm

    arm()
