"""Views: pure functions from a Report to plain data. Drawing is someone else's job."""

from nimble_viz.views.payload import view_data
from nimble_viz.views.summary import verdict

__all__ = ["verdict", "view_data"]
