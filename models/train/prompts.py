"""Synthetic prompts: templates times fillers, in classes.

`training_prompts` and `heldout_prompts` draw from disjoint fillers (every fifth filler of each
list is held out), so a held-out prompt never shares its topic with a training prompt.
"""

from __future__ import annotations

import random

CLASSES = ("code", "lists", "tables", "repetition", "qa", "prose", "math", "dialogue")

TOPICS = """solar energy;the water cycle;black holes;the Roman Empire;photosynthesis;
coffee brewing;chess openings;volcanoes;jazz music;the French Revolution;machine learning;
bicycle repair;bread baking;the human heart;coral reefs;renewable energy;time management;
the stock market;gardening;yoga;vaccines;the Great Wall of China;public speaking;electric cars;
dinosaurs;the Moon landing;recycling;meditation;ancient Egypt;the Amazon rainforest;
home insulation;cloud computing;sleep hygiene;the periodic table;Shakespeare's plays;swimming;
the immune system;urban planning;honey bees;cryptography;budgeting;the Industrial Revolution;
watercolor painting;earthquakes;job interviews;climate change;wolves;the Renaissance;
healthy eating;databases;camping;the solar system;knitting;democracy;robotics;whales;
black-and-white photography;inflation;the nervous system;remote work;tea ceremonies;
operating systems;mountain climbing;DNA;the Olympic Games;first aid;glaciers;classical music;
supply chains;penguins;3D printing;gravity;the printing press;running a marathon;antibiotics;
friendship;magnetism;beekeeping;the internet;poetry;cats;nuclear power;stress management;
soil erosion;cybersecurity;sailing;the brain;quantum physics;vegetarian cooking;data privacy;
architecture;the Silk Road;rainbows;leadership;owls;woodworking;the digestive system;
space telescopes;volunteering;trains;tornadoes;mindfulness;desert plants;learning a new language;
video games;wind turbines;the Viking Age;teamwork;chocolate;hurricanes;compilers;elephants;
pottery;blockchain;museum visits;ocean currents;music theory;the metric system;family reunions;
insects;airplane wings;small business marketing;dental care;bridges;cheese making;penicillin;
forest fires;national parks;the alphabet;cold weather clothing;logic puzzles;origami;batteries;
customer service;world maps;skiing;the Mediterranean diet;horses;satellites;public libraries;
computer networks;dolphins;the Cold War;vertical farming;digital art;tides;emotional intelligence;
steam engines;birds of prey;moving to a new city;fermentation;backpacking in Europe;spreadsheets;
turtles;rockets;note taking;salt;the history of writing;kitchen safety;aquariums;local elections;
fractions;paper making;wild mushrooms;hand washing;lighthouse keepers;the carbon cycle;
negotiation;car maintenance;garden birds;folk tales;optical illusions;credit cards;
weather forecasting;tropical fruit;fire safety;city parks;bacteria;pet adoption;event planning;
hiking boots;the metabolism;street food;journaling;typography;lasers"""
PLACES = """Paris;Tokyo;Cairo;New York;Rome;Lima;Sydney;Nairobi;Berlin;Mumbai;Toronto;Oslo;Lisbon;
Athens;Dublin;Seoul;Mexico City;Istanbul;Vienna;Bangkok;Boston;Madrid;Prague;Havana;Reykjavik;
Edinburgh;Kyoto;Marrakesh;Amsterdam;Chicago;Venice;Buenos Aires;Cape Town;Helsinki;Singapore"""
PEOPLE = """Anna;Ben;Carla;David;Elena;Frank;Grace;Henry;Isabel;Jack;Karen;Liam;Maya;Noah;Olivia;
Peter;Quinn;Rosa;Sam;Tara;Uma;Victor;Wendy;Xavier;Yara;Zoe;Marco;Lucy;Omar;Nina"""
JOBS = """teacher;doctor;baker;software engineer;farmer;pilot;librarian;nurse;chef;carpenter;
journalist;shopkeeper;scientist;musician;gardener;firefighter;accountant;plumber;tour guide;
lawyer;mechanic;painter;waiter;coach;receptionist;detective;astronaut;fisherman;tailor;vet"""
CODE = """checks whether a number is prime;reverses a string;computes the factorial of a number;
returns the nth Fibonacci number;finds the largest number in a list;counts the vowels in a string;
sorts a list with bubble sort;performs binary search on a sorted list;
removes duplicates from a list;merges two sorted lists;checks whether a string is a palindrome;
computes the greatest common divisor;converts Celsius to Fahrenheit;
counts word frequencies in a text;flattens a nested list;implements a stack;implements a queue;
implements a linked list;reads a file line by line;writes a list of numbers to a CSV file;
computes the average of a list;transposes a matrix;multiplies two matrices;
generates a random password;validates an email address;sums the digits of a number;
finds all anagrams of a word;implements quicksort;implements merge sort;computes the median;
calculates compound interest;converts a decimal number to binary;counts characters in a string;
checks whether a year is a leap year;capitalizes each word;finds the second largest element;
rotates a list by k positions;finds the intersection of two lists;prints a multiplication table;
simulates rolling two dice;implements a simple calculator;implements a bank account class;
stores contacts in a dictionary;parses a JSON string;finds the longest word in a sentence;
computes the power of a number without using the power operator;
generates all permutations of a list;implements depth-first search on a graph;
implements breadth-first search on a graph;checks if two strings are anagrams;
finds missing numbers in a range;implements insertion sort;implements a timer;
draws a triangle of stars;converts Roman numerals to integers;solves FizzBuzz;
finds common prefixes;groups words by their first letter;computes the distance between two points;
implements a to-do list;models a rectangle with area and perimeter;models a student with grades;
counts down from ten;finds prime factors;swaps two variables;checks balanced parentheses;
encrypts text with a Caesar cipher;computes the sum of squares;filters even numbers from a list;
zips two lists into a dictionary;measures the execution time of a function;downloads a web page;
computes the standard deviation;formats a date;splits a list into chunks;shuffles a deck of cards;
finds the mode of a list;validates a credit card number;implements a binary search tree;
computes the least common multiple;implements tic-tac-toe;guesses a random number;
counts lines in a file"""
LANGUAGES = "Python;Python;Python;JavaScript;Java;C;C++;Go;Rust;TypeScript;Ruby;SQL"
SENTENCES = """The committee will meet on Tuesday to discuss the new budget.;
My brother sold his old car.;The children played in the garden until dinner.;
We missed the last train home.;She opened the window.;
The results of the study were published last week.;It rained for three days without stopping.;
The museum is closed on Mondays.;He forgot his keys at the office again.;
The soup needs a little more salt.;Our team finished the project ahead of schedule.;
The lights went out during the storm.;They planted apple trees along the road.;
The new bridge will open in spring.;I left my umbrella on the bus.;
The teacher explained the problem twice.;A small dog followed us to the beach.;
The shop sells fresh bread.;Many people prefer to work from home.;
The river was frozen for most of January.;We need to buy more paint.;
The concert was cancelled because of illness.;Her grandmother taught her how to sew.;
The bill has been paid.;The company hired twenty new workers this year.;
The path leads through a dark forest.;He runs every morning."""
WORDS = """apple;river;stone;music;yellow;window;garden;silver;cloud;pepper;ocean;tiger;candle;
mirror;ladder;pencil;bridge;rocket;basket;butter;forest;winter;hammer;island;lemon;planet;shadow;
button;carpet;dragon"""
ITEMS = """apples;books;pencils;oranges;marbles;cookies;tickets;eggs;stamps;bottles;flowers;coins;
chairs;shirts;stickers;candles;cups;balloons;cards;toys"""
LANGS = "French;Spanish;German;Italian;Portuguese"

TEMPLATES: dict[str, list[str]] = {
    "code": [
        "Write a {language} function that {code}.",
        "Write a {language} program that {code}.",
        "Write a {language} function that {code}. Include comments.",
        "Show me {language} code that {code}, with an example of how to use it.",
        "How do I write code that {code} in {language}?",
        "Write a {language} function that {code} and add unit tests for it.",
        "Write a {language} class for {topic} with at least three methods.",
        "Create an HTML page about {topic} with a heading, a paragraph and a list.",
        "Write a JSON object that describes {topic} with at least five fields.",
        "Write SQL statements that create a table for {topic} and insert five rows.",
        "Write CSS rules for a page about {topic}.",
        "Explain step by step a {language} function that {code}.",
    ],
    "lists": [
        "List {n} facts about {topic}.",
        "Give me {n} tips for {topic}.",
        "List {n} things to do in {place}.",
        "Give me a numbered list of {n} ideas related to {topic}.",
        "What are the main advantages and disadvantages of {topic}? Use bullet points.",
        "Make a checklist for {topic}.",
        "Write a step-by-step guide to {topic}.",
        "Make a packing list for a {n}-day trip to {place}.",
        "List {n} questions to ask a {job}.",
        "Make a 7-day plan for learning about {topic}.",
        "List {n} book titles about {topic}.",
        "Give {n} examples of {topic} with one sentence each.",
        "List the daily tasks of a {job}.",
        "Write an outline for an essay about {topic}.",
        "List {n} words related to {topic}.",
    ],
    "tables": [
        "Make a Markdown table with {n} rows about {topic}.",
        "Create a table that compares {topic} and {topic2}.",
        "Make a weekly schedule as a Markdown table for a {job}.",
        "Write a CSV file with {n} rows of data about {topic}.",
        "Create a table of the pros and cons of {topic}.",
        "Make a table with the columns Name, Age and Job for {n} people.",
        "Make a table of {n} cities including {place} with country and population.",
        "Write a Markdown table of the numbers 1 to {n} with their squares and cubes.",
        "Make a price list as a table for a shop that sells things for {topic}.",
    ],
    "repetition": [
        "Repeat the following sentence {n} times: {sentence}",
        'Write the word "{word}" {big} times.',
        "Count from 1 to {big}.",
        "Count from {big} down to 1, one number per line.",
        "Write the multiplication table of {n}.",
        "List the even numbers from 2 to {big2}.",
        "Copy this text exactly: {sentence} {sentence2} {sentence3}",
        "Write out the alphabet, one letter per line, with a word for each letter about {topic}.",
        'Write {n} sentences that all begin with the words "I like {topic}".',
        "Correct the spelling and repeat the text: {sentence} {sentence2}",
        "Write a song about {topic} with a chorus that repeats three times.",
        "Write a chant about {topic} in which every line begins with the same words.",
        "Write the names of the months, and after each the sentence: {sentence}",
        "Write the days of the week, each followed by an activity about {topic}.",
    ],
    "qa": [
        "What is {topic}?",
        "Explain {topic} in simple terms.",
        "Why is {topic} important?",
        "How does {topic} work?",
        "What should a beginner know about {topic}?",
        "Explain {topic} to a ten-year-old.",
        "What is the history of {topic}?",
        "What are common mistakes people make with {topic}?",
        "What is the difference between {topic} and {topic2}?",
        "How has {topic} changed over time?",
        "What does a {job} do?",
        "Tell me about {place}.",
        "How can I learn more about {topic}?",
        "What problems are linked to {topic}?",
        "Define {topic} in one paragraph.",
        "How are {topic} and {topic2} related?",
    ],
    "prose": [
        "Write a short story about {topic}.",
        "Write a paragraph about {topic}.",
        "Write a short essay about {topic}.",
        "Write a poem about {topic}.",
        "Write a story about a {job} named {name} who visits {place}.",
        "Write a letter from {name} to {name2} about {topic}.",
        "Write an email about {topic} to a colleague.",
        "Describe a day in the life of a {job} in {place}.",
        "Write a news article about {topic}.",
        "Write a speech about {topic}.",
        "Write a blog post about {topic}.",
        "Describe {place} in autumn.",
        "Write a fairy tale about a {job} and {topic}.",
        "Write an advertisement for {topic}.",
        "Summarize the topic of {topic} in three paragraphs.",
        "Continue the story: {sentence} {sentence2}",
        "Rewrite this in a formal tone: {sentence} {sentence2}",
        "Translate into {lang}: {sentence}",
    ],
    "math": [
        "{name} has {a} {item} and buys {b} more. How many {item} does {name} have? "
        "Show your work.",
        "{name} has {a} {item} and gives {b} to {name2}. How many are left? Explain.",
        "A box holds {n} {item}. How many {item} are in {a} boxes?",
        "What is {a} plus {b}? Explain step by step.",
        "What is {a} times {n}? Show the steps.",
        "Solve the equation {n}x + {a} = {b}.",
        "A train travels {a} miles in {n} hours. What is its average speed?",
        "Find the area of a rectangle with length {a} and width {n}.",
        "If {item} cost ${n} each, how much do {a} {item} cost?",
        "What is {n}% of {b}? Show the steps.",
        "What is the average of {a}, {b} and {n}?",
        "Find the perimeter of a square with side {a}.",
        "{name} saves ${n} every week. How much does {name} have after {a} weeks?",
        "Simplify the fraction {a}/{b}.",
        "Find the next three numbers: {n}, {n2}, {n3}, {n4}",
    ],
    "dialogue": [
        "Write a dialogue between a {job} and a customer about {topic}.",
        "Write a conversation between {name} and {name2} about {topic}.",
        "Write a short play in which {name} and {name2} argue about {topic}.",
        "Write an interview with a {job} about {topic}.",
        "Write a phone call between {name} and a {job}.",
        "Write a chat between two friends planning a trip to {place}.",
        "Write a dialogue between a parent and a child about {topic}.",
        "Write an interview of {n} questions and answers about {topic}.",
    ],
}


def _split(text: str, held: bool) -> list[str]:
    items = [" ".join(x.split()) for x in text.split(";")]
    return [x for i, x in enumerate(items) if (i % 5 == 4) == held]


class Filler:
    """Fills templates from the training or the held-out part of every list."""

    def __init__(self, held: bool, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lists = {
            k: _split(v, held)
            for k, v in {
                "topic": TOPICS,
                "place": PLACES,
                "name": PEOPLE,
                "job": JOBS,
                "code": CODE,
                "sentence": SENTENCES,
                "word": WORDS,
                "item": ITEMS,
            }.items()
        }
        self.lists |= {"language": LANGUAGES.split(";"), "lang": LANGS.split(";")}

    def fill(self, template: str) -> str:
        """One random filling; the same name with 2 or 3 behind it is a different filler."""
        r = self.rng
        n, step = r.randint(3, 12), r.randint(2, 9)
        values: dict[str, object] = {
            "n": n,
            "n2": n + step,
            "n3": n + 2 * step,
            "n4": n + 3 * step,
            "a": r.randint(5, 60),
            "b": r.randint(61, 240),
            "big": r.randint(15, 60),
            "big2": 2 * r.randint(15, 50),
        }
        for key, items in self.lists.items():
            picks = r.sample(items, 3) if len(items) >= 3 else items * 3
            values[key], values[key + "2"], values[key + "3"] = picks
        return template.format(**values)


def _draw(held: bool, count: int, seed: int) -> list[dict[str, str]]:
    filler, seen, out = Filler(held, seed), set(), []
    rounds = 0
    while len(out) < count and rounds < 50 * count:
        name = CLASSES[rounds % len(CLASSES)]
        rounds += 1
        prompt = filler.fill(filler.rng.choice(TEMPLATES[name]))
        if prompt not in seen:
            seen.add(prompt)
            out.append({"class": name, "prompt": prompt})
    return out


def training_prompts(count: int, seed: int = 1) -> list[dict[str, str]]:
    """`count` different prompts, the classes in turn."""
    return _draw(False, count, seed)


def heldout_prompts(count: int, seed: int = 2) -> list[dict[str, str]]:
    """As `training_prompts`, from the held-out fillers."""
    return _draw(True, count, seed)
