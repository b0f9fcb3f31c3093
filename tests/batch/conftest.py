from tests.render.fixtures import _no_grad, ltx2_folder, ltx_folder  # noqa: F401
