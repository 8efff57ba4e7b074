"""GGUF models in several files, as ``llama-gguf-split`` writes them."""

from __future__ import annotations

from pathlib import Path

import gguf


def split(path: Path, most_tensors: int, *, small_first: bool = False) -> Path:
    """Replace a file by parts with at most ``most_tensors`` tensors; returns the first part.

    With ``small_first``, the first part has only the metadata.
    """
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=most_tensors, small_first_shard=small_first)
    for name, entry in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(name, entry.contents(), *entry.types[:2])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data.copy(), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.unlink()
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
