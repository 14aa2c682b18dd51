"""The notebook layer: the only package that imports ipywidgets, traitlets and IPython. It imports no torch."""

from sgnb.ui.export import export_panel
from sgnb.ui.findings import pitfalls_panel
from sgnb.ui.form import hyperparams_panel
from sgnb.ui.guard import Guard
from sgnb.ui.run_state import RunState
from sgnb.ui.runs import run_panel
from sgnb.ui.state import PanelState
from sgnb.ui.studio import Panel, panel

__all__ = [
    "Guard",
    "Panel",
    "PanelState",
    "RunState",
    "export_panel",
    "hyperparams_panel",
    "panel",
    "pitfalls_panel",
    "run_panel",
]
