"""Dense attention through foveate's own cache: the baseline of every comparison."""

from typing import ClassVar

from foveate.methods.base import About, Method, Replay, Role, register


@register
class Dense(Method):
    """Every query looks at every earlier key."""

    name: ClassVar[str] = "dense"
    about: ClassVar[About] = About("Vaswani et al. 2017")
    stateful: ClassVar[bool] = False
    replay: ClassVar[Replay] = Replay()
    role: ClassVar[Role] = Role("dense", reads_all=True)
