"""Find candidates with FAISS and sort them with ColBERT: python search.py [QUERY] [--url URL]."""

import argparse

import faiss
import httpx
import numpy as np

DOCUMENTS = [
    "Films are lent for one week, books for four.",
    "The fee for late returns is 50 cents a day.",
    "The library was built in 1904 and has two reading rooms.",
    "A film about the library is shown every Sunday.",
    "A card for the library is free for residents.",
    "Books that somebody else has reserved cannot be kept longer.",
]
CANDIDATES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("query", nargs="?", default="How long may I keep a film?")
    parser.add_argument("--url", default="http://localhost:8000", help="HTTP address of the server")
    arguments = parser.parse_args()
    server = httpx.Client(base_url=arguments.url, timeout=60)

    vectors = embed(server, DOCUMENTS)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    _, numbers = index.search(embed(server, [arguments.query]), CANDIDATES)
    candidates = [DOCUMENTS[number] for number in numbers[0]]

    body = {"model": "colbert", "query": arguments.query, "documents": candidates}
    for result in server.post("/rerank", json=body).raise_for_status().json()["results"]:
        print(f"{result['relevance_score']:8.4f}  {candidates[result['index']]}")


def embed(server: httpx.Client, texts: list[str]) -> np.ndarray:
    """Vectors of length 1, FP32 [texts, dimension]."""
    answer = server.post("/v1/embeddings", json={"model": "retriever", "input": texts})
    return np.array([item["embedding"] for item in answer.raise_for_status().json()["data"]], np.float32)


if __name__ == "__main__":
    main()
