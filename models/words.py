"""The small world that the documents of the synthetic task speak of.

Every name, attribute and value is one token of our tokenizer (``models/corpus.py`` sees to it), with and without a
space in front.
"""

from __future__ import annotations

# ruff: noqa: SIM905  (lists of words read best as words)

NAMES = """
Adela Agnes Albin Alder Alma Amos Anders Anselm Anton Arden Ariel Arlo Asher Astrid Aubrey Audrey August Aurel Basil
Beatrix Bella Benno Bertha Bjorn Blake Boris Boyd Brenda Briar Bruno Bryce Calla Calvin Carla Casper Cecil Celia Cedric
Clara Claude Clemens Clio Colin Conrad Cora Corin Cosmo Cyril Dahlia Damian Daphne Darius Delia Dexter Diana Dora Doris
Dorian Duncan Edda Edgar Edith Edmund Elena Elias Elke Ella Elmer Eloise Elsa Emil Emma Enid Enzo Erica Ernest Esme
Esther Ethan Eudora Eva Evander Fabian Faye Felix Fergus Fiona Flora Floyd Frances Frank Freda Frida Gareth Gemma George
Gilda Giles Gina Glenda Gloria Gordon Greta Grover Gustav Hannah Harold Harriet Hattie Hazel Hector Heidi Helga Henry
Herman Hilda Holly Homer Horace Hubert Hugo Ida Igor Imogen Ines Ingrid Ira Irene Iris Irma Isaac Ivan Ivy Jacob Jane
Janus Jasper Jerome Jessie Joan Jonas Joyce Judith Julian Juno Karin Karl Kasper Keith Kirsten Klaus Kurt Lambert Lars
Laura Leander Leo Leonie Leopold Lester Lewis Lidia Linus Lionel Livia Lloyd Lorenz Lotte Louisa Lucas Lucian Lydia
Mabel Magnus Malcolm Marcel Margot Marina Martha Martin Matilda Maude Maurice Max Melvin Mildred Milo Minerva Miriam
Moritz Morris Muriel Myron Nadia Naomi Nell Nestor Nina Noel Nora Norbert Octavia Odette Olaf Olga Oliver Olive Orla
Orson Oscar Osmund Otto Pamela Pascal Paula Percy Petra Philip Phoebe Piers Portia Quentin Rafael Ralph Ramona Raymond
Regina Rex Rhoda Robin Roland Rolf Romy Rosa Rowan Rufus Rupert Ruth Sabine Samson Saskia Selma Serena Sidney Sigrid
Silas Silvia Simon Sofia Stella Sven Sybil Tamara Tess Thea Theo Thora Tilda Tobias Ulric Una Ursula Valerie Vera Victor
Viola Virgil Vivian Walda Walter Wanda Warren Wilma Winston Xavier Yvonne Zelda Zoe
""".split()
"""Whom the facts are about."""

FIXED = """
colour animal flower metal fabric fruit stone tree drink spice bird tool fish song crest boat game coin
""".split()
"""Attributes that a document states once and for all."""

CHANGING = "mood task seat order goal rank guest dress".split()
"""Attributes that later documents may state anew; then the later value counts."""

VALUES = """
amber apple apron arrow aspen badge bagel bamboo banjo barley basil beacon beaver beech birch bison blaze bonnet bottle
branch brass bread breeze brick bridge bronze bucket butter button cabin cactus camel candle canoe canvas carbon carpet
carrot castle cedar cellar chalk cherry chess cider cinder clover cobalt cobra cocoa comet copper coral cotton crane
crater cream cricket crown crystal curry cypress daisy denim desert diamond dragon drum eagle ebony echo elder ember
emerald falcon feather fennel ferry fiddle flame flint flute forest fossil fountain fox frost garlic garnet ginger
glacier glove goblet gold goose granite grape gravel guitar hammer harbor harp hawk hazelnut helmet heron honey hornet
ibis indigo iron island ivory jackal jade jasmine jersey jewel juniper kettle kiwi ladder lagoon lantern larch laurel
lava lavender leather lemon lentil lilac lily lime linen lion lizard lobster locket lotus lumber lynx magnet magpie
mango maple marble marsh meadow melon mercury mint mirror mocha moose mosaic moss muffin mustard nectar needle nickel
nutmeg oak oasis ocean olive onion onyx opal orange orchid osprey otter oyster paddle palm panda panther paprika parrot
peach peanut pearl pebble pepper piano pigeon pillow pine planet plum pony poplar poppy prairie prism pumpkin puppet
python quail quartz quill rabbit raft raven reed ribbon river robin rocket rope rose ruby saddle saffron sage salmon
sand sapphire satin scarlet shell silk silver slate snow sparrow spider spruce squid star steel storm sugar swan tango
teal temple thistle thunder tiger timber topaz torch tulip tundra turnip turtle umber valley vanilla velvet violet
violin walnut walrus waltz wheat whisky willow wolf wool yarrow yogurt zebra zinc
""".split()
"""What may be said of them; no value belongs to one attribute more than to another, so nothing can be guessed."""
