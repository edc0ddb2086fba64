"""Long-convolution layers and models on streams: out of core, live from pipe to pipe, and token by token."""

from lowtide.stream.effects import Effect as Effect
from lowtide.stream.effects import layer_effect as layer_effect
from lowtide.stream.effects import response_effect as response_effect
from lowtide.stream.generate import generate as generate
from lowtide.stream.generate import generate_tokens as generate_tokens
from lowtide.stream.generate import sample_tokens as sample_tokens
from lowtide.stream.model_file import load_layer as load_layer
from lowtide.stream.model_file import save_layer as save_layer
from lowtide.stream.model_out_of_core import apply_model as apply_model
from lowtide.stream.out_of_core import Applied as Applied
from lowtide.stream.out_of_core import apply_layer as apply_layer
from lowtide.stream.pipe import pipe as pipe
from lowtide.stream.wav import read_wav as read_wav
