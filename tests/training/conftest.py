"""A small model on small data, the same each time."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sgnb.training import Trainer


class Setup:
    """Trains a small classifier; `self.model` is the last one."""

    def __init__(self, root):
        self.root = root
        generator = torch.Generator().manual_seed(0)
        self.targets = torch.randint(0, 4, (70,), generator=generator)
        self.inputs = torch.randn(70, 3, 8, 8, generator=generator) + self.targets.reshape(-1, 1, 1, 1)
        self.dropout = 0.0
        self.batch_size = 16
        self.listeners = []
        self.experiment = "small"

    def new_model(self):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(self.dropout),
            nn.Linear(8, 4),
        )

    def loaders(self):
        data = TensorDataset(self.inputs, self.targets)
        return DataLoader(data, self.batch_size, shuffle=True), DataLoader(data, 32)

    def train(self, model=None, **hyperparams):
        self.model = self.new_model() if model is None else model
        self.trainer = Trainer(self.experiment, ckpt_root_dir=self.root, device="cpu", listeners=self.listeners)
        train_loader, valid_loader = self.loaders()
        values = {"max_epochs": 2, "silent_mode": True, **hyperparams}
        return self.trainer.train(self.model, values, train_loader, valid_loader)

    def weights(self):
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


@pytest.fixture
def setup(tmp_path):
    return Setup(tmp_path)
