"""pypipe in the place of torch.distributed.pipelining, for trainers whose imports are not yours to change.

`install()` comes before the trainer's import. Stages and schedules that the trainer then builds from torch's names are
pypipe's, behind the constructors, base classes and private methods that trainers use of torch's.
"""

from pypipe.compat.installation import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
