"""The words of the built-in Wordle: common English words of five letters, in alphabetical order.

Read only by `envs/builtin/wordle`. Changing a word changes the environment's digest, so nodes with the old list are
refused.
"""

TEXT = """
about above actor acute admit adopt adult after again agent agree ahead alarm album alert alike alive allow alone
along aloud alter among angel anger angle angry apart apple apply arena argue arise armor array arrow aside asset
audio audit avoid awake award aware bacon badge badly baker basic basin basis beach beard beast began begin begun
being belly below bench berry birth black blade blame blank blast blaze blend bless blind block bloom board boast
bonus boost booth bound brain brand brass brave bread break breed brick bride brief bring broad broke brook broom
brown brush build built bunch burst buyer cabin cable camel candy canoe cargo carry carve catch cause cedar chain
chair chalk charm chart chase cheap check cheek cheer chess chest chief child chill choir chord chose chunk civic
civil claim clash class clean clear clerk click cliff climb cloak clock close cloth cloud clown coach coast color
comet comic coral couch cough could count court cover craft crane crash crawl crazy cream creek crest crisp cross
crowd crown crust curve cycle daily dairy daisy dance dealt debut decay delay dense depot depth diary digit diner
ditch dizzy dodge doing donor doubt dough dozen draft drain drama drank drawn dream dress dried drift drill drink
drive drove dusty eager eagle early earth easel eight elbow elder elect elite empty enemy enjoy enter entry equal
equip error essay event every exact exist extra fable faith false fancy favor feast fence ferry fetch fever fiber
field fifth fifty fight final first flame flash flask fleet flesh float flock flood floor flour fluid flute focus
force forge forth forty forum found frame fresh front frost fruit fully funny giant given glass glide globe glory
glove going grace grade grain grand grant grape graph grasp grass great green greet grief grill grind group grove
guard guess guest guide guilt habit happy harsh haste hatch haven heart heavy hedge hello hinge hobby honey honor
horse hotel hound house hover human humid humor hurry ideal image imply index inner input ivory jelly jewel joint
jolly judge juice juicy kayak kneel knife knock known label labor large later laugh layer learn lease least leave
legal lemon level lever light limit linen liver lobby local logic loose lorry lower loyal lucky lunar lunch magic
major maker maple march match maybe mayor medal melon mercy merit merry metal meter midst might minor mixed model
money month moral motor mount mouse mouth movie music naval nerve never newly night noble noise north novel nurse
ocean offer often olive onion opera orbit order organ other otter ought outer owner paint panel panic paper party
pasta patch pause peace peach pearl pedal penny phase phone photo piano piece pilot pinch pitch pizza place plain
plane plant plate plaza point polar porch pound power press price pride prime print prize proof proud prove pulse
punch pupil puppy purse queen quest quick quiet quilt quite quote radar radio raise rally ranch range rapid ratio
reach react ready realm rebel refer relax reply rider ridge right rigid risky rival river roast robin robot rocky
rough round route royal rugby ruler rural saint salad sauce scale scarf scene scent scope score scout seize sense
serve seven shade shake shape share shark sharp sheep sheet shelf shell shift shine shiny shirt shock shore short
shout shown sight silly since sixth sixty skate skill skirt slate sleep slice slide slope small smart smile smoke
snack snake solar solid solve sound south space spare spark speak speed spell spend spice spike spill spine split
spoke spoon sport spray squad stack staff stage stair stake stamp stand stare start state steam steel steep stick
still stock stone stood stool store storm story stove strap straw strip study stuff style sugar suite sunny super
sweet swift swing sword table taken taste teach tempo tenor tenth thank their theme there these thick thing think
third those three threw throw thumb tiger tight timer title toast today token tooth topic torch total touch tough
towel tower toxic trace track trade trail train trait treat trend trial tribe trick tried truck truly trunk trust
truth tulip twice twist ultra uncle under union unite unity until upper upset urban usage usual valid value valve
vapor vault venue verse video visit vital vivid vocal voice voter wagon waist waste watch water weary weave whale
wheat wheel where which while white whole widen width woman world worry worth would woven wrist write wrong wrote
yacht yeast yield young youth zebra
"""

WORDS: tuple[str, ...] = tuple(TEXT.split())
