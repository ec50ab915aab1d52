//! The pages of the documentation and the program agree.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use riopipe_target::{AnaOptions, Config, NamespaceOptions};

use crate::{
    serve::{serve, signal},
    site::{content, finish, rio_in},
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn page(name: &str) -> String {
    let path = root().join("docs").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The words of all sources, with one space between them: strings in the code go over line ends.
fn sources() -> String {
    fn add(folder: &Path, text: &mut String) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                add(&path, text);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                text.push_str(&fs::read_to_string(&path).unwrap());
            }
        }
    }
    let mut text = String::new();
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        add(&entry.unwrap().path().join("src"), &mut text);
    }
    let words: Vec<_> = text.split_whitespace().filter(|word| *word != "\\").collect();
    words.join(" ").replace("\\\"", "\"")
}

/// The parts of the first cell of each row that are set as code.
fn messages(page: &str) -> Vec<&str> {
    let rows = page.lines().filter(|line| line.starts_with("| `"));
    let cells = rows.filter_map(|row| row.split(" | ").next());
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect()
}

#[test]
fn every_message_that_is_explained_exists() {
    let (page, sources) = (page("errors.md"), sources());
    let messages = messages(&page);
    assert!(messages.len() > 40, "the rows were not found: {messages:?}");
    let missing: Vec<_> = messages.iter().filter(|part| !sources.contains(**part)).collect();
    assert!(missing.is_empty(), "docs/errors.md explains what no message has: {missing:#?}");
}

#[test]
fn every_key_of_a_configuration_is_explained() {
    let page = page("configuration.md");
    let explained: BTreeSet<_> = messages(&page).into_iter().collect();
    let namespaces = vec![NamespaceOptions::default()];
    let ana = vec![AnaOptions { port: 1, group: Some(1), state: "inaccessible".to_owned() }];
    let config = Config { namespaces, ana, ..Config::default() };
    let value = serde_json::to_value(config).unwrap();
    let keys = |value: &serde_json::Value| -> BTreeSet<String> {
        value.as_object().unwrap().keys().cloned().collect()
    };
    let mut of_config = keys(&value);
    of_config.extend(keys(&value["namespaces"][0]));
    of_config.extend(keys(&value["ana"][0]));
    of_config.extend(keys(&value["dhchap"]));
    of_config.extend(keys(&value["tls"]));
    let explained: BTreeSet<_> = explained.into_iter().map(str::to_owned).collect();
    assert_eq!(explained, of_config);
}

/// Every key that these commands print with `-o json` is in the page about the program.
#[test]
fn every_key_of_the_json_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let words = ["--drive", "file:d,size=64M", "--drive", "mem:64M"];
    let log = ["--log", "file:l,size=4M", "--metrics", "127.0.0.1:0"];
    let (target, printed) = serve(folder, &[&words[..], &log].concat());
    let address = printed["addresses"][0].as_str().unwrap();
    let (host, port) = address.rsplit_once(':').unwrap();
    let metrics = printed["metrics"].as_str().unwrap();
    fs::write(folder.join("a"), content(3 << 20)).unwrap();
    let mut keys = BTreeSet::new();
    add_keys(&printed, &mut keys);
    let member = ["-m", address];
    for words in [
        &["target", "check", "--create", "--drive", "file:x,size=64M", "--log", "mem:2M"][..],
        &["discover", "-a", host, "-s", port],
        &[&["volume", "create", "v"], &member[..]].concat(),
        &[&["volume", "write", "v", "a"], &member[..]].concat(),
        &[&["volume", "verify", "v", "a"], &member[..]].concat(),
        &[&["volume", "read", "v", "b"], &member[..]].concat(),
        &[&["volume", "list"], &member[..]].concat(),
        &[&["volume", "recover", "v"], &member[..]].concat(),
        &[&["volume", "rename", "v", "w"], &member[..]].concat(),
        &[&["volume", "show"], &member[..]].concat(),
        &["target", "stat", metrics],
        &[&["volume", "delete", "w"], &member[..]].concat(),
        &["fs", "mkfs", "image", "--size", "128M"],
        &["fs", "fsck", "image"],
        &["fs", "stat", "image"],
    ] {
        let done = rio_in(folder, &[words, &["-o", "json"]].concat());
        assert_eq!(done.code, 0, "{words:?}: {done:?}");
        add_keys(&done.json(), &mut keys);
    }
    signal(&target, "-TERM");
    assert_eq!(finish(target).code, 0);
    add_keys(&rio_in(folder, &["log", "dump", "file:l", "-o", "json"]).ok(), &mut keys);
    let page = page("program.md");
    let code: Vec<_> = page.split('`').skip(1).step_by(2).collect();
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let explained: BTreeSet<_> =
        code.iter().flat_map(|code| code.split(|c| !is_name(c))).map(str::to_owned).collect();
    let missing: Vec<_> = keys.difference(&explained).collect();
    assert!(keys.len() > 60 && missing.is_empty(), "docs/program.md lacks {missing:?}");
}

/// Adds the keys of all objects in a value.
fn add_keys(value: &serde_json::Value, keys: &mut BTreeSet<String>) {
    for (key, value) in value.as_object().into_iter().flatten() {
        keys.insert(key.clone());
        add_keys(value, keys);
    }
    value.as_array().into_iter().flatten().for_each(|value| add_keys(value, keys));
}

/// Each link to a page, and to a heading of a page, leads somewhere.
#[test]
fn links_between_pages_lead_somewhere() {
    let mut names: Vec<PathBuf> = fs::read_dir(root().join("docs"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect();
    names.extend(["README.md", "CHANGELOG.md", "CONTRIBUTING.md"].map(|name| root().join(name)));
    let mut wrong = Vec::new();
    for name in &names {
        let text = fs::read_to_string(name).unwrap();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if link.contains("://") || link.contains(char::is_whitespace) {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let path = match file {
                "" => name.clone(),
                file => name.parent().unwrap().join(file),
            };
            let is_right = path.exists()
                && (anchor.is_empty()
                    || anchors(&fs::read_to_string(&path).unwrap()).contains(anchor));
            if !is_right {
                wrong.push(format!("{}: {link}", name.file_name().unwrap().display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The anchors of a page's headings, as GitHub makes them.
fn anchors(page: &str) -> BTreeSet<String> {
    let headings = page.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|heading| {
            let text = heading.trim_start_matches('#').trim().to_lowercase();
            let kept = text.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        })
        .collect()
}
