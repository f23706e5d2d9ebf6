"""Words for the keys of retrieval tasks: common, short, distinct."""

_ADJECTIVES = """
amber ancient arctic autumn bitter bold brave breezy brisk bronze calm careful cheerful clever copper cosmic crimson
crooked curious dapper daring distant dusty eager earnest elegant emerald faithful famous fearless fluffy foggy frosty
gentle gilded golden graceful grand hasty hidden hollow honest humble icy jolly keen lively lofty lonely loyal lucky
marble mellow merry mighty misty modest mossy narrow nimble noble patient playful polite proud quiet rapid rustic sandy
scarlet shiny silent silver sleepy smooth snowy solemn spotted steady stormy sturdy subtle sunny swift tender thirsty
thorny tidy tiny tranquil velvet vivid wandering wicked wild windy wise witty wooden young zealous
"""
_NOUNS = """
acorn anchor antler anvil apple arrow badger bamboo banjo barrel basket beacon beaver blanket blossom bottle bridge
bucket button cabin camel candle canyon carpet castle cedar cello cherry chimney cobbler comet compass coral cradle
cricket crystal cushion dagger daisy desert dolphin drum eagle ember engine falcon feather ferry fiddle flute forest
fountain garden glacier goblet guitar hammer harbor harvest hazel heron hornet island jacket jaguar kettle ladder
lantern lemon lizard magnet maple meadow mirror monsoon needlework nutmeg oasis orchard otter oyster paddle parrot
pebble pelican pepper pillow pirate planet plum pocket puddle quarry rabbit raven ribbon river rocket saddle sailor
salmon scarf shovel sparrow spider spoon squirrel statue teapot temple thimble tiger timber trumpet tulip tunnel turtle
umbrella valley violin wagon walnut whistle willow window wizard
"""


ADJECTIVES = _ADJECTIVES.split()
NOUNS = _NOUNS.split()
