"""Libraries that embed and rank: each as its documentation shows it, with its defaults where possible."""

from __future__ import annotations

from typing import Any

import cohere
import numpy as np
import openai
import pytest
from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.utils import Secret
from langchain_cohere import CohereEmbeddings, CohereRerank
from langchain_openai import OpenAIEmbeddings
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference as TeiRerank

TEXTS = ["the library is open", "a bus", "the bus to the library"]
QUERY = "bus library"
#: The numbers of the documents by the share of the words of the query that each has.
ORDER = [2, 0, 1]


def vector(text: str, task: int = 3) -> list[float]:
    return [len(text), ord(text[0]), ord(text[-1]), task]


def unit(values: list[float]) -> Any:
    return np.array(values) / np.linalg.norm(values)


@pytest.mark.client("openai", "embeddings")
def test_openai(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
        answer = client.embeddings.create(model="embedder", input=TEXTS)
        assert [item.embedding for item in answer.data] == [vector(text) for text in TEXTS]
        assert answer.usage.total_tokens == 11
        short = client.embeddings.create(model="embedder", input="a", dimensions=2).data[0].embedding
        assert np.allclose(short, unit(vector("a")[:2]))


@pytest.mark.client("cohere", "embeddings", "rerank", "errors")
def test_cohere(url: str) -> None:
    client = cohere.ClientV2(api_key="any", base_url=url)
    answer = client.embed(model="embedder", texts=TEXTS, input_type="search_query", embedding_types=["float", "binary"])
    assert answer.embeddings.float_ == [vector(text, 1) for text in TEXTS]
    assert answer.embeddings.binary is not None and len(answer.embeddings.binary[0]) == 1
    ranked = client.rerank(model="ranker", query=QUERY, documents=TEXTS, top_n=2)
    assert [(result.index, result.relevance_score) for result in ranked.results] == [(2, 1.0), (0, 0.5)]
    with pytest.raises(cohere.errors.NotFoundError):
        client.rerank(model="nobody", query=QUERY, documents=TEXTS)


@pytest.mark.client("cohere", "embeddings", "rerank")
def test_older_cohere(url: str) -> None:
    client = cohere.Client(api_key="any", base_url=url)
    answer = client.embed(model="embedder", texts=TEXTS, input_type="search_document")
    assert answer.embeddings == [vector(text, 2) for text in TEXTS]
    ranked = client.rerank(model="ranker", query=QUERY, documents=TEXTS, return_documents=True)
    assert [result.index for result in ranked.results] == ORDER
    assert ranked.results[0].document is not None and ranked.results[0].document.text == TEXTS[2]


@pytest.mark.client("LangChain", "embeddings")
def test_langchain_over_openai(url: str) -> None:
    embeddings = OpenAIEmbeddings(
        model="embedder", base_url=f"{url}/v1", api_key="any", check_embedding_ctx_length=False
    )
    assert embeddings.embed_query("a") == vector("a")
    assert embeddings.embed_documents(TEXTS) == [vector(text) for text in TEXTS]


@pytest.mark.client("LangChain", "embeddings", "rerank")
def test_langchain_over_cohere(url: str) -> None:
    embeddings = CohereEmbeddings(model="embedder", base_url=url, cohere_api_key="any")
    assert embeddings.embed_query("a") == vector("a", 1)
    assert embeddings.embed_documents(TEXTS) == [vector(text, 2) for text in TEXTS]
    ranker = CohereRerank(model="ranker", base_url=url, cohere_api_key="any", top_n=2)
    ranked = ranker.rerank(TEXTS, QUERY)
    assert [result["index"] for result in ranked] == ORDER[:2]


@pytest.mark.client("LlamaIndex", "embeddings")
def test_llama_index_over_openai(url: str) -> None:
    embedder = OpenAILikeEmbedding(model_name="embedder", api_base=f"{url}/v1", api_key="any")
    assert embedder.get_text_embedding_batch(TEXTS) == [vector(text) for text in TEXTS]
    queries = OpenAILikeEmbedding(
        model_name="embedder", api_base=f"{url}/v1", api_key="any", additional_kwargs={"extra_body": {"task": "query"}}
    )
    assert queries.get_query_embedding("a") == vector("a", 1)


@pytest.mark.client("LlamaIndex", "embeddings", "rerank")
def test_llama_index_over_tei(url: str) -> None:
    embedder = TextEmbeddingsInference(model_name="embedder", base_url=url)
    assert np.allclose(embedder.get_text_embedding_batch(TEXTS), [unit(vector(text)) for text in TEXTS])
    ranker = TeiRerank(base_url=url, top_n=2)
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    ranked = ranker.postprocess_nodes(nodes, query_str=QUERY)
    assert [node.get_content() for node in ranked] == [TEXTS[index] for index in ORDER[:2]]


@pytest.mark.client("Haystack", "embeddings")
def test_haystack(url: str) -> None:
    key = Secret.from_token("any")
    embedder = OpenAITextEmbedder(model="embedder", api_base_url=f"{url}/v1", api_key=key)
    assert embedder.run("a")["embedding"] == vector("a")
    documents = OpenAIDocumentEmbedder(model="embedder", api_base_url=f"{url}/v1", api_key=key, progress_bar=False)
    embedded = documents.run([Document(content=text) for text in TEXTS])["documents"]
    assert [document.embedding for document in embedded] == [vector(text) for text in TEXTS]
