//! The functions, constants and structures that the Rust source of this crate exports.

use std::io::Write as _;
use std::path::Path;

/// All that C sees.
#[derive(Debug, Default)]
pub(crate) struct Source {
    pub(crate) functions: Vec<Function>,
    /// Names and values, both as C has them.
    pub(crate) constants: Vec<(String, String)>,
    pub(crate) structures: Vec<Structure>,
}

#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) name: String,
    /// The types of the parameters, as C has them.
    pub(crate) parameters: Vec<String>,
    /// The type of the result, as C has it.
    pub(crate) result: String,
    pub(crate) has_guard: bool,
}

#[derive(Debug)]
pub(crate) struct Structure {
    pub(crate) name: String,
    /// The name of each field, and its declaration in C with `@` in the place of the name.
    pub(crate) fields: Vec<(String, String)>,
}

impl Source {
    pub(crate) fn read() -> Self {
        let mut source = Self::default();
        let mut files: Vec<_> =
            std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src"))
                .unwrap()
                .map(|entry| entry.unwrap().path())
                .collect();
        files.sort();
        for file in files {
            let text = std::fs::read_to_string(file).unwrap();
            // Without the tests, and without comments.
            let code = text.split("#[cfg(test)]").next().unwrap();
            let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
            source.add(&lines.collect::<Vec<_>>().join("\n"));
        }
        source
    }

    fn add(&mut self, code: &str) {
        for (at, _) in code.match_indices("extern \"C\" fn ") {
            let rest = code[at..].trim_start_matches("extern \"C\" fn ");
            let exported = code[..at].trim_end().trim_end_matches("unsafe").trim_end();
            assert!(exported.ends_with("#[unsafe(no_mangle)]\npub"), "not exported: {rest:.80}");
            let (name, rest) = rest.split_once('(').unwrap();
            let (parameters, rest) = rest.split_once(')').unwrap();
            let (result, body) = rest.split_once('{').unwrap();
            let body = body.split("\n}").next().unwrap();
            let result = result.trim().strip_prefix("->").map_or("void".to_owned(), c_type);
            self.functions.push(Function {
                name: name.to_owned(),
                parameters: members(parameters).map(|(_, rust)| c_type(rust)).collect(),
                result,
                has_guard: body.contains("guard(") || body.contains("guard_value("),
            });
        }
        for line in code.lines().map(str::trim) {
            // `pub const RIOP_X: u32 = 1;`, or `RIOP_X = 1;` in the list of codes.
            let constant = line.strip_prefix("pub const ").unwrap_or(line);
            if constant.starts_with("RIOP_")
                && let Some((name, value)) = constant.trim_end_matches(';').split_once(" = ")
            {
                let name = name.split(':').next().unwrap();
                let value = value.replace("u32::MAX", "UINT32_MAX");
                self.constants.push((name.to_owned(), value));
            }
        }
        for (at, _) in code.match_indices("#[repr(C)]\npub struct ") {
            let rest = code[at..].trim_start_matches("#[repr(C)]\npub struct ");
            let (name, rest) = rest.split_once(" {").unwrap();
            let fields = rest.split("\n}").next().unwrap();
            let fields = members(fields)
                .map(|(name, rust)| (name.trim_start_matches("pub ").to_owned(), c_field(rust)));
            self.structures.push(Structure { name: snake_case(name), fields: fields.collect() });
        }
    }
}

/// The names and types of `a: A, b: B`.
fn members(list: &str) -> impl Iterator<Item = (&str, &str)> {
    list.split(',').filter_map(|member| member.trim().split_once(": "))
}

/// The declaration of a field, with `@` in the place of its name.
fn c_field(rust: &str) -> String {
    match rust.strip_prefix('[').and_then(|array| array.strip_suffix(']')) {
        Some(array) => {
            let (element, length) = array.split_once("; ").unwrap();
            format!("{} @[{length}]", c_type(element))
        }
        None => format!("{} @", c_type(rust)),
    }
}

fn c_type(rust: &str) -> String {
    let rust = rust.trim();
    if let Some(target) = rust.strip_prefix("*mut ") {
        return format!("{} *", c_type(target));
    }
    if let Some(target) = rust.strip_prefix("*const ") {
        return format!("{} const *", c_type(target));
    }
    match rust {
        "c_char" => "char".into(),
        "c_int" => "int".into(),
        "c_void" => "void".into(),
        "usize" => "size_t".into(),
        "u8" | "u16" | "u32" | "u64" => format!("uint{}_t", &rust[1..]),
        "i64" => "int64_t".into(),
        name => {
            assert!(name.starts_with("Riop"), "a type without a counterpart in C: {name:?}");
            snake_case(name)
        }
    }
}

/// `RiopOpenOptions`: `riop_open_options`.
fn snake_case(name: &str) -> String {
    let mut snake = String::new();
    for c in name.chars() {
        if c.is_ascii_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.push(c.to_ascii_lowercase());
    }
    snake
}

/// Reports what was not tested, also when the test passes: `cargo test` does not keep what is written to the descriptor.
pub(crate) fn skip(what: &str) {
    writeln!(std::io::stderr(), "capi: NOT TESTED: {what}").expect("there is a stderr");
}
