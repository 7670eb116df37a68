"""Container images of our parts, made from Debian packages and wheels without a container engine.

One list says what is in them (`recipes.py`). From it come archives that any runtime imports, a bill of
materials for each, and plain Dockerfiles for who would rather build with Docker.
"""

from forktree_dev.container_images.building import BuiltImage, build
from forktree_dev.container_images.recipes import NODE, OPERATOR, RECIPES, Recipe

__all__ = ["NODE", "OPERATOR", "RECIPES", "BuiltImage", "Recipe", "build"]
