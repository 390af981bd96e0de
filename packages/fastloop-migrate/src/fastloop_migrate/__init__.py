"""The command ``fastloop import`` and the plugin ``transformers-callbacks`` of fastloop."""
