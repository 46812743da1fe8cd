"""A gRPC client of Triton Inference Server, with the tensors of TensorRT-LLM's llmapi model.
A test that imports this file is skipped without the package tritonclient."""

from __future__ import annotations

from queue import SimpleQueue

import numpy as np
import pytest

grpc = pytest.importorskip("tritonclient.grpc", reason="needs tritonclient[grpc]")

SECONDS = 120
DTYPES = {
    "BYTES": np.object_,
    "BOOL": np.bool_,
    "FP32": np.float32,
    "INT32": np.int32,
    "UINT64": np.uint64,
}


class Client:
    """A gRPC client with one stream."""

    def __init__(self, server):
        self._client = grpc.InferenceServerClient(server.grpc)
        self._heard = SimpleQueue()
        self._client.start_stream(lambda result, error: self._heard.put((result, error)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._client.stop_stream()
        self._client.close()

    def send(self, request_id="", sequence_id=0, **inputs):
        """A request with these inputs: text, numbers, truth values, or lists of them."""
        self._client.async_stream_infer(
            "pensieve",
            [
                tensor(name, value if isinstance(value, list) else [value])
                for name, value in inputs.items()
            ],
            request_id=request_id,
            sequence_id=sequence_id,
        )

    def next(self):
        """The next response. Raises InferenceServerException if it is an error."""
        result, error = self._heard.get(timeout=SECONDS)
        if error is not None:
            raise error
        return result

    def reply(self):
        """All responses up to the last one: token ids, text, the last one."""
        ids = []
        text = ""
        while True:
            result = self.next()
            ids += result.as_numpy("output_ids").tolist()
            text += result.as_numpy("text_output")[0].decode()
            if result.get_response().parameters["triton_final_response"].bool_param:
                return ids, text, result

    def refusal(self):
        with pytest.raises(grpc.InferenceServerException) as caught:
            self.next()
        return str(caught.value)

    def cancel(self):
        """All that is open on the stream, and the stream."""
        self._client.stop_stream(cancel_requests=True)


def tensor(name, values):
    kinds = {
        str: "BYTES",
        bool: "BOOL",
        float: "FP32",
        int: "UINT64" if name.endswith("seed") else "INT32",
    }
    kind = kinds[type(values[0])]
    if kind == "BYTES":
        values = [text.encode() for text in values]
    tensor_input = grpc.InferInput(name, [len(values)], kind)
    tensor_input.set_data_from_numpy(np.array(values, dtype=DTYPES[kind]))
    return tensor_input
