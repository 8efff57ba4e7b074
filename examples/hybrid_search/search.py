"""Find documents by their words and by their meaning together: python search.py [QUERY] [--url URL]."""

import argparse

import httpx
from qdrant_client import QdrantClient, models

DOCUMENTS = [
    "Error E42: the paper tray is empty.",
    "Error E43: the lid is open.",
    "If the printer does not start, check the cable and the switch at the back.",
    "Ink is delivered within three working days.",
    "Clean the glass with a soft cloth to remove stripes from scans.",
    "The guarantee ends two years after the purchase.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("query", nargs="?", default="What does error E42 mean?")
    parser.add_argument("--url", default="http://localhost:8000", help="HTTP address of the server")
    arguments = parser.parse_args()
    server = httpx.Client(base_url=arguments.url, timeout=60)

    dense, sparse = embed(server, DOCUMENTS, "document")
    database = QdrantClient(":memory:")
    database.create_collection(
        "documents",
        vectors_config={"dense": models.VectorParams(size=len(dense[0]), distance=models.Distance.COSINE)},
        sparse_vectors_config={"sparse": models.SparseVectorParams()},
    )
    points = [
        models.PointStruct(id=number, vector={"dense": dense[number], "sparse": sparse[number]}, payload={"text": text})
        for number, text in enumerate(DOCUMENTS)
    ]
    database.upsert("documents", points)

    [dense_query], [sparse_query] = embed(server, [arguments.query], "query")
    found = database.query_points(
        "documents",
        prefetch=[
            models.Prefetch(query=dense_query, using="dense", limit=10),
            models.Prefetch(query=sparse_query, using="sparse", limit=10),
        ],
        query=models.FusionQuery(fusion=models.Fusion.RRF),
        limit=3,
    )
    for point in found.points:
        print(f"{point.score:8.4f}  {point.payload['text']}")


def embed(server: httpx.Client, texts: list[str], kind: str) -> tuple[list[list[float]], list[models.SparseVector]]:
    """The dense and the sparse vectors of texts, which are queries or documents."""
    answer = server.post("/v1/embeddings", json={"model": "dense", "input": texts, "input_type": kind})
    dense = [item["embedding"] for item in answer.raise_for_status().json()["data"]]
    answer = server.post("/v2/models/sparse/embed_sparse", json={"inputs": texts})
    sparse = [
        models.SparseVector(indices=[item["index"] for item in items], values=[item["value"] for item in items])
        for items in answer.raise_for_status().json()
    ]
    return dense, sparse


if __name__ == "__main__":
    main()
