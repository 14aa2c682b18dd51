"""A small depthwise-separable CNN for 32x32 images (MobileNet's block, https://arxiv.org/abs/1704.04861, with SiLU).

Its training step is mostly memory traffic of BatchNorm and SiLU, which a compiler can fuse: a fair place to look for a
gain on a CPU.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from sgnb.models.registry import register_model


class DepthwiseSeparableCNN(nn.Module):
    """Logits [B, K] of images [B, 3, H, W], H and W at least 8.

    Args:
        num_classes: K.
        width: Channels after the stem; the later stages have twice and four times as many.
    """

    def __init__(self, num_classes: int, width: int = 32) -> None:
        super().__init__()
        if num_classes < 1 or width < 1:
            raise ValueError(f"num_classes and width must be at least 1, got {num_classes} and {width}")
        self.stem = _conv(3, width, kernel_size=3)
        self.blocks = nn.Sequential(
            _block(width, width, stride=1),
            _block(width, 2 * width, stride=2),
            _block(2 * width, 2 * width, stride=1),
            _block(2 * width, 4 * width, stride=2),
            _block(4 * width, 4 * width, stride=1),
        )
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, image_BCHW: Tensor) -> Tensor:  # noqa: N803 (shape suffix: B = batch, C H W = channels and size)
        """Return the logits."""
        features_BCHW = self.blocks(self.stem(image_BCHW))  # noqa: N806
        return cast(Tensor, self.head(features_BCHW.mean(dim=(2, 3))))


def _conv(inputs: int, outputs: int, *, kernel_size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel_size, stride, kernel_size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.SiLU())


def _block(inputs: int, outputs: int, *, stride: int) -> nn.Sequential:
    depthwise = _conv(inputs, inputs, kernel_size=3, stride=stride, groups=inputs)
    return nn.Sequential(depthwise, _conv(inputs, outputs, kernel_size=1))


@register_model
def dscnn(num_classes: int, width: int = 32) -> DepthwiseSeparableCNN:
    """Return the model of the recipe `digits_dscnn`."""
    return DepthwiseSeparableCNN(num_classes, width)
