"""The default stages under slime's name of their module: ``get_group_data_meta_info``, ``is_valid_group``,
``filter_item``, ``normalize_group_data`` and ``pad_group_data``."""

from agl_slime.buffer.stages import *  # noqa: F403
