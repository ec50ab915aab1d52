//! The header declares what the library exports: the same functions with the same types, the same structures, the same
//! constants, and nothing else.
//!
//! The test reads the Rust source, writes a C file with a declaration for each item of it, and lets the C compiler
//! compare these with the header.

mod source;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use source::Source;
use tempfile::TempDir;

fn header() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/riopipe.h");
    std::fs::read_to_string(path).unwrap()
}

/// The header without its comments.
fn without_comments(header: &str) -> String {
    let mut code = String::new();
    let mut rest = header;
    while let Some((before, comment)) = rest.split_once("/*") {
        code.push_str(before);
        rest = comment.split_once("*/").expect("a comment ends").1;
    }
    code + rest
}

/// The words of `code` that begin with `prefix`, each with the first character behind it that is no space.
fn words<'a>(code: &'a str, prefix: &'a str) -> impl Iterator<Item = (&'a str, Option<char>)> + 'a {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    code.match_indices(prefix).filter_map(move |(at, _)| {
        let begins = !code[..at].chars().next_back().is_some_and(is_word);
        let rest = &code[at..];
        let word = &rest[..rest.find(|c| !is_word(c)).unwrap_or(rest.len())];
        let next = rest[word.len()..].chars().find(|c| *c != ' ');
        begins.then_some((word, next))
    })
}

/// A C file that compiles only if the header has each item of the source as it is there.
fn check_file(source: &Source) -> String {
    let mut c = String::from("#include \"riopipe.h\"\n");
    for function in &source.functions {
        let (name, result) = (&function.name, &function.result);
        let parameters = match function.parameters.is_empty() {
            true => "void".to_owned(),
            false => function.parameters.join(", "),
        };
        writeln!(c, "{result} (*const address_of_{name})({parameters}) = {name};").unwrap();
    }
    for (name, value) in &source.constants {
        writeln!(c, "_Static_assert({name} == {value}, \"{name}\");").unwrap();
    }
    for structure in &source.structures {
        let name = &structure.name;
        writeln!(c, "struct rust_{name} {{").unwrap();
        for (field, declaration) in &structure.fields {
            writeln!(c, "    {};", declaration.replace('@', field)).unwrap();
        }
        writeln!(c, "}};").unwrap();
        writeln!(c, "_Static_assert(sizeof({name}) == sizeof(struct rust_{name}), \"size\");")
            .unwrap();
        for (field, _) in &structure.fields {
            writeln!(
                c,
                "_Static_assert(offsetof({name}, {field}) == offsetof(struct rust_{name}, {field}), \"{field}\");\n\
                 _Static_assert(__builtin_types_compatible_p(__typeof__((({name} *)0)->{field}), \
                 __typeof__(((struct rust_{name} *)0)->{field})), \"{field}\");"
            )
            .unwrap();
        }
        // Padding would be bytes that a caller can't set to zero, and could hide a field.
        let sizes = structure.fields.iter().map(|(f, _)| format!("sizeof((({name} *)0)->{f})"));
        let sum = sizes.collect::<Vec<_>>().join(" + ");
        writeln!(c, "_Static_assert({sum} == sizeof({name}), \"no padding in {name}\");").unwrap();
    }
    c
}

/// Compares a header with the source.
fn check(header: &str, source: &Source) -> Result<(), String> {
    let code = without_comments(header);
    let functions: BTreeSet<&str> = words(&code, "riop_")
        .filter(|(_, next)| *next == Some('('))
        .map(|(word, _)| word)
        .collect();
    let exported: BTreeSet<&str> = source.functions.iter().map(|f| &*f.name).collect();
    if functions != exported {
        let differ: Vec<_> = functions.symmetric_difference(&exported).collect();
        return Err(format!(
            "functions that are only in the header or only in the library: {differ:?}"
        ));
    }
    let constants: BTreeSet<&str> = words(&code, "RIOP_").map(|(word, _)| word).collect();
    let defined: BTreeSet<&str> = source.constants.iter().map(|(name, _)| &**name).collect();
    if constants != defined {
        let differ: Vec<_> = constants.symmetric_difference(&defined).collect();
        return Err(format!(
            "constants that are only in the header or only in the library: {differ:?}"
        ));
    }
    let dir = TempDir::new().unwrap();
    let file = |name: &str, text: &str| -> PathBuf {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    file("riopipe.h", header);
    let check = file("check.c", &check_file(source));
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-c", "-o", "/dev/null"]).arg(check);
    let output = cc.output().expect("there is a C compiler, since Rust needs one to link");
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

#[test]
fn the_header_is_that_of_the_library() {
    let source = Source::read();
    assert!(source.functions.len() > 40 && source.constants.len() > 40, "{source:?}");
    assert!(source.structures.len() >= 8, "{source:?}");
    if let Err(error) = check(&header(), &source) {
        panic!("include/riopipe.h is not current:\n{error}");
    }
}

/// Each kind of difference is noticed.
#[test]
fn a_header_that_differs_is_noticed() {
    let (header, source) = (header(), Source::read());
    for (from, to, error) in [
        ("int riop_buf_free(riop_buf *buf);", "", "riop_buf_free"),
        (
            "int riop_buf_free(riop_buf *buf);",
            "int riop_buf_free(riop_group *buf);",
            "riop_buf_free",
        ),
        (
            "int riop_buf_free(riop_buf *buf);",
            "void riop_buf_free(riop_buf *buf);",
            "riop_buf_free",
        ),
        (
            "uint32_t riop_version(void);",
            "uint32_t riop_version(void); int riop_more(void);",
            "riop_more",
        ),
        ("uint32_t place, riop_error", "uint64_t place, riop_error", "riop_group_write"),
        ("RIOP_FULL = 23,", "RIOP_FULL = 36,", "RIOP_FULL"),
        ("RIOP_FULL = 23,", "", "RIOP_FULL"),
        ("RIOP_OK = 0,", "RIOP_OK = 0, RIOP_MORE = 40,", "RIOP_MORE"),
        ("uint32_t streams;        /*", "uint64_t streams;        /*", "riop_create_options"),
        ("const char *host_nqn; ", "char *host_nqn; ", "host_nqn"),
        (
            "    uint32_t no_merge; ",
            "    uint32_t more; uint32_t no_merge; ",
            "riop_stream_options",
        ),
        ("    uint64_t complete; ", "    uint64_t whole; ", "complete"),
    ] {
        assert!(header.contains(from), "the header has no {from:?}");
        let found = check(&header.replacen(from, to, 1), &source).unwrap_err();
        assert!(found.contains(error), "{from:?} -> {to:?}:\n{found}");
    }
}

/// No panic leaves the library: each function runs inside of a guard, except those that only return a constant.
#[test]
fn each_function_has_a_guard() {
    let source = Source::read();
    let unguarded: Vec<&str> =
        source.functions.iter().filter(|f| !f.has_guard).map(|f| &*f.name).collect();
    assert_eq!(unguarded, ["riop_code_name", "riop_version", "riop_version_text"]);
}

/// The header compiles alone, as C11 and as C++11, without a warning.
#[test]
fn the_header_compiles_in_both_languages() {
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    for (compiler, language, standard) in [("cc", "c", "-std=c11"), ("c++", "c++", "-std=c++11")] {
        if Command::new(compiler).arg("--version").output().is_err() {
            source::skip(&format!(
                "the header is not compiled as {language}: there is no {compiler}"
            ));
            continue;
        }
        let mut command = Command::new(compiler);
        command.args([
            standard,
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
            "-fsyntax-only",
            "-x",
        ]);
        let output = command.arg(language).arg(include.join("riopipe.h")).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        // A header as the main file is no mistake here.
        assert!(output.status.success(), "{compiler}: {errors}");
    }
}
