from tests.oracle import install

print(install().server)
