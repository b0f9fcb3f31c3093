from tests.render.fixtures import ltx2_folder, ltx_folder  # noqa: F401
