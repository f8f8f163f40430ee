"""Serve a resources server of the package nemo-gym: `nemo_gym_server.py PORT NAME`, without the cluster of Ray and the
other servers that `gym env start` starts with it. Prints nothing.
"""

import importlib
import inspect
import sys
from types import SimpleNamespace

import uvicorn
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.server_utils import ServerClient

port, name = int(sys.argv[1]), sys.argv[2]
module = importlib.import_module(f"resources_servers.{name}.app")
(kind,) = (
    each
    for _, each in inspect.getmembers(module, inspect.isclass)
    if issubclass(each, SimpleResourcesServer) and each.__module__ == module.__name__
)
settings = {"name": name, "host": "127.0.0.1", "port": port, "entrypoint": "app.py", "domain": "other"}
config = kind.model_fields["config"].annotation(**settings)
client = ServerClient.model_construct(head_server_config=SimpleNamespace(), global_config_dict={})
server = kind(config=config, server_client=client)
app = server.setup_webserver()
server.setup_exception_middleware(app)
uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")
