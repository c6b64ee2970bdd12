"""omlxd: a local inference daemon for Macs with Apple Silicon.

The rooms live in the repository's top-level folders; the links beside this file make them `omlxd.*`.
"""

__version__ = "0.1.0"
