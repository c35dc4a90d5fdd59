"""Tests of dbsp_megatron; a package only so that no installed package named `tests` can take its place."""
